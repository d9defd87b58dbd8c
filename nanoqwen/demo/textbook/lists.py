"""Textbook problems about lists and dictionaries. The notation is explained in nanoqwen/demo/textbook/__init__.py."""

PROBLEMS = '''
@ find_max maximum max_of_list largest max_value(items: list[float]) -> float
? Return the largest element of $items.
? Find the largest number in a list.
? Return the maximum of a list.
> [3, 1, 4] ; [-2, -5]
largest = $items[0]
for $item in $items:
    if $item > largest:
        largest = $item
return largest
--
largest = $items[0]
for $item in $items[1:]:
    if $item > largest:
        largest = $item
return largest

@ find_min minimum min_of_list smallest(items: list[float]) -> float
? Return the smallest element of $items.
? Find the smallest number in a list.
> [3, 1, 4]
smallest = $items[0]
for $item in $items:
    if $item < smallest:
        smallest = $item
return smallest

@ min_max find_min_max(items: list[float]) -> tuple
? Return the smallest and the largest element of $items.
> [3, 1, 4]
return min($items), max($items)

@ index_of_max argmax(items: list[float]) -> int
? Return the index of the largest element of $items.
> [3, 1, 4]
best = 0
for i in range(1, len($items)):
    if $items[i] > $items[best]:
        best = i
return best

@ second_largest find_second_largest(items: list[float]) -> float
? Return the second largest element of $items.
> [3, 1, 4, 4]
return sorted(set($items))[-2]

@ sum_list list_sum sum_of_list total(items: list[float]) -> float
? Return the sum of all elements of $items.
? Add up the numbers in a list.
> [1, 2, 3] ; []
$total = 0
for $item in $items:
    $total += $item
return $total

@ product_of_list list_product(items: list[float]) -> float
? Return the product of all elements of $items.
> [2, 3, 4]
$result = 1
for $item in $items:
    $result *= $item
return $result

@ mean average mean_of_list(items: list[float]) -> float
? Return the arithmetic mean of $items.
? Compute the average of a list of numbers.
> [1, 2, 3, 4]
return sum($items) / len($items)
--
if not $items:
    raise ValueError("mean of an empty list")
return sum($items) / len($items)

@ median median_of_list(items: list[float]) -> float
? Return the median of $items.
? Compute the median of a list of numbers.
> [3, 1, 2] ; [4, 1, 3, 2]
ordered = sorted($items)
middle = len(ordered) // 2
if len(ordered) % 2 == 1:
    return ordered[middle]
return (ordered[middle - 1] + ordered[middle]) / 2

@ mode most_common most_frequent(items: list) -> object
? Return the element that occurs most often in $items.
> [1, 2, 2, 3]
counts = {}
for $item in $items:
    counts[$item] = counts.get($item, 0) + 1
return max(counts, key=counts.get)

@ variance(items: list[float]) -> float
? Compute the variance of a list of numbers.
> [1, 2, 3, 4]
mean = sum($items) / len($items)
return sum(($item - mean) ** 2 for $item in $items) / len($items)

@ standard_deviation std(items: list[float]) -> float
? Compute the standard deviation of a list of numbers.
> [2, 4, 4, 4, 5, 5, 7, 9]
mean = sum($items) / len($items)
variance = sum(($item - mean) ** 2 for $item in $items) / len($items)
return variance ** 0.5

@ reverse_list reversed_list(items: list) -> list
? Return $items in reverse order.
> [1, 2, 3]
return $items[::-1]
--
$result = []
for $item in $items:
    $result.insert(0, $item)
return $result

@ remove_duplicates unique deduplicate(items: list) -> list
? Return $items without duplicates, in the original order.
? Remove the duplicates from a list.
> [1, 2, 1, 3]
seen = set()
$result = []
for $item in $items:
    if $item not in seen:
        seen.add($item)
        $result.append($item)
return $result
--
$result = []
for $item in $items:
    if $item not in $result:
        $result.append($item)
return $result

@ has_duplicates contains_duplicate(items: list) -> bool
? Check whether $items contains an element twice.
> [1, 2, 1] ; [1, 2]
return len($items) != len(set($items))

@ flatten flatten_list(lists: list[list]) -> list
? Flatten a list of lists into a single list.
? Return all elements of a list of lists as one list.
> [[1, 2], [3]]
$result = []
for sublist in $lists:
    for $item in sublist:
        $result.append($item)
return $result
--
return [$item for sublist in $lists for $item in sublist]

@ deep_flatten flatten_nested(items: list) -> list
? Flatten a list that may hold lists at any depth.
> [1, [2, [3]]]
$result = []
for $item in $items:
    if isinstance($item, list):
        $result.extend($f($item))
    else:
        $result.append($item)
return $result

@ chunk chunks split_list(items: list, size: int) -> list[list]
? Split $items into chunks of $size elements.
> [1, 2, 3, 4, 5], 2
return [$items[i:i + $size] for i in range(0, len($items), $size)]
--
$result = []
for i in range(0, len($items), $size):
    $result.append($items[i:i + $size])
return $result

@ rotate rotate_list rotate_left(items: list, k: int) -> list
? Rotate $items to the left by $k positions.
> [1, 2, 3, 4], 1
$k %= len($items)
return $items[$k:] + $items[:$k]

@ filter_even even_numbers get_even_numbers(items: list[int]) -> list[int]
? Return the even numbers in $items.
> [1, 2, 3, 4]
return [$item for $item in $items if $item % 2 == 0]
--
$result = []
for $item in $items:
    if $item % 2 == 0:
        $result.append($item)
return $result

@ filter_odd odd_numbers(items: list[int]) -> list[int]
? Return the odd numbers in $items.
> [1, 2, 3, 4]
return [$item for $item in $items if $item % 2 == 1]

@ sum_even sum_of_even_numbers(items: list[int]) -> int
? Return the sum of the even numbers in $items.
> [1, 2, 3, 4]
return sum($item for $item in $items if $item % 2 == 0)
--
$total = 0
for $item in $items:
    if $item % 2 == 0:
        $total += $item
return $total

@ square_all squares square_list(items: list[float]) -> list[float]
? Return the squares of the numbers in $items.
> [1, 2, 3]
return [$item * $item for $item in $items]
--
return [$item ** 2 for $item in $items]

@ count_occurrences count_item(items: list, target) -> int
? Count how often $target occurs in $items.
> [1, 2, 1], 1
count = 0
for $item in $items:
    if $item == $target:
        count += 1
return count

@ count_items frequencies count_elements(items: list) -> dict
? Count how often each element occurs in $items.
> ["a", "b", "a"]
counts = {}
for $item in $items:
    counts[$item] = counts.get($item, 0) + 1
return counts

@ running_sum cumulative_sum prefix_sums(items: list[float]) -> list[float]
? Return the running totals of $items.
> [1, 2, 3]
$result = []
$total = 0
for $item in $items:
    $total += $item
    $result.append($total)
return $result

@ intersection common_elements(a: list, b: list) -> list
? Return the elements that $a and $b have in common.
> [1, 2, 3], [2, 3, 4]
return [$item for $item in $a if $item in $b]

@ union merge_unique(a: list, b: list) -> list
? Return the elements of $a and $b without duplicates.
> [1, 2], [2, 3]
$result = list($a)
for $item in $b:
    if $item not in $result:
        $result.append($item)
return $result

@ swap swap_elements(items: list, i: int, j: int) -> list
? Swap the elements at positions i and j of $items.
> [1, 2, 3], 0, 2
$items[i], $items[j] = $items[j], $items[i]
return $items

@ invert_dict reverse_dict swap_keys_values(d: dict) -> dict
? Return a dictionary with keys and values exchanged.
> {"a": 1, "b": 2}
return {value: key for key, value in $d.items()}
--
$result = {}
for key, value in $d.items():
    $result[value] = key
return $result

@ merge_dicts(a: dict, b: dict) -> dict
? Merge two dictionaries, preferring the values of $b.
> {"x": 1}, {"y": 2}
$result = dict($a)
$result.update($b)
return $result

@ group_by group_items(items: list, key) -> dict
? Group the elements of $items by the value that $key returns for them.
> 
groups = {}
for $item in $items:
    groups.setdefault($key($item), []).append($item)
return groups

@ sort_by_value sort_dict_by_value(d: dict) -> dict
? Sort a dictionary by its values.
> {"a": 2, "b": 1}
return dict(sorted($d.items(), key=lambda pair: pair[1]))

@ partition split_by(items: list, predicate) -> tuple
? Split $items into those that satisfy a predicate and those that do not.
> 
yes, no = [], []
for $item in $items:
    if predicate($item):
        yes.append($item)
    else:
        no.append($item)
return yes, no

@ zip_lists pair_up(a: list, b: list) -> list[tuple]
? Combine two lists into a list of pairs.
> [1, 2], ["a", "b"]
return list(zip($a, $b))
--
return [($a[i], $b[i]) for i in range(min(len($a), len($b)))]

@ range_list count_up(start: int, stop: int) -> list[int]
? Return the integers from $start up to but not including $stop.
> 2, 5
$result = []
while $start < $stop:
    $result.append($start)
    $start += 1
return $result

@ sort_list sort sorted_list(items: list) -> list
? Return $items in ascending order.
? Sort a list.
> [3, 1, 2]
return sorted($items)
'''
