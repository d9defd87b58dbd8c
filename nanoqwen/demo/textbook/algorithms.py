"""Textbook algorithms: search, sorting, vectors, graphs, dynamic programming. The notation is explained in nanoqwen/demo/textbook/__init__.py."""

PROBLEMS = '''
@ binary_search(items: list, target) -> int
? Return the index of $target in the sorted list $items, or -1.
? Search a sorted list for $target by halving the range.
> [1, 3, 5, 7], 5 ; [1, 3], 4
low, high = 0, len($items) - 1
while low <= high:
    mid = (low + high) // 2
    if $items[mid] == $target:
        return mid
    if $items[mid] < $target:
        low = mid + 1
    else:
        high = mid - 1
return -1
--
low = 0
high = len($items) - 1
while low <= high:
    mid = (low + high) // 2
    if $items[mid] == $target:
        return mid
    elif $items[mid] < $target:
        low = mid + 1
    else:
        high = mid - 1
return -1

@ linear_search find_index index_of(items: list, target) -> int
? Return the index of $target in $items, or -1.
> [4, 2, 9], 9 ; [], 1
for i, $item in enumerate($items):
    if $item == $target:
        return i
return -1
--
for i in range(len($items)):
    if $items[i] == $target:
        return i
return -1

@ bubble_sort(items: list) -> list
? Sort $items with bubble sort and return it.
? Sort a list with the bubble sort algorithm.
> [3, 1, 2]
n = len($items)
for i in range(n):
    for j in range(n - i - 1):
        if $items[j] > $items[j + 1]:
            $items[j], $items[j + 1] = $items[j + 1], $items[j]
return $items

@ insertion_sort(items: list) -> list
? Sort $items with insertion sort and return it.
> [3, 1, 2]
for i in range(1, len($items)):
    key = $items[i]
    j = i - 1
    while j >= 0 and $items[j] > key:
        $items[j + 1] = $items[j]
        j -= 1
    $items[j + 1] = key
return $items

@ selection_sort(items: list) -> list
? Sort $items with selection sort and return it.
> [3, 1, 2]
for i in range(len($items)):
    smallest = i
    for j in range(i + 1, len($items)):
        if $items[j] < $items[smallest]:
            smallest = j
    $items[i], $items[smallest] = $items[smallest], $items[i]
return $items

@ quick_sort quicksort(items: list) -> list
? Return a sorted copy of $items, using quicksort.
? Sort a list with the quicksort algorithm.
> [3, 1, 2, 3]
if len($items) <= 1:
    return $items
pivot = $items[len($items) // 2]
left = [$item for $item in $items if $item < pivot]
middle = [$item for $item in $items if $item == pivot]
right = [$item for $item in $items if $item > pivot]
return $f(left) + middle + $f(right)

@ merge_sort mergesort(items: list) -> list
? Return a sorted copy of $items, using merge sort.
? Sort a list with the merge sort algorithm.
> [3, 1, 2]
if len($items) <= 1:
    return $items
mid = len($items) // 2
left = $f($items[:mid])
right = $f($items[mid:])
merged = []
i = j = 0
while i < len(left) and j < len(right):
    if left[i] <= right[j]:
        merged.append(left[i])
        i += 1
    else:
        merged.append(right[j])
        j += 1
return merged + left[i:] + right[j:]

@ merge_sorted merge merge_sorted_lists(a: list, b: list) -> list
? Merge two sorted lists into one sorted list.
> [1, 4], [2, 3]
$result = []
i = j = 0
while i < len($a) and j < len($b):
    if $a[i] <= $b[j]:
        $result.append($a[i])
        i += 1
    else:
        $result.append($b[j])
        j += 1
return $result + $a[i:] + $b[j:]

@ is_sorted(items: list) -> bool
? Check whether $items is in ascending order.
> [1, 2, 2] ; [2, 1]
return all($items[i] <= $items[i + 1] for i in range(len($items) - 1))
--
for i in range(len($items) - 1):
    if $items[i] > $items[i + 1]:
        return False
return True

@ two_sum find_pair(nums: list[int], target: int) -> tuple
? Return the indices of two numbers in $nums that add up to $target.
> [2, 7, 11, 15], 9
seen = {}
for i, $item in enumerate($nums):
    if $target - $item in seen:
        return seen[$target - $item], i
    seen[$item] = i
return None

@ max_subarray max_subarray_sum kadane(items: list[int]) -> int
? Return the largest sum of a contiguous part of $items.
> [-2, 1, -3, 4, -1, 2, 1, -5, 4]
best = current = $items[0]
for $item in $items[1:]:
    current = max($item, current + $item)
    best = max(best, current)
return best

@ dot_product dot(a: list[float], b: list[float]) -> float
? Return the dot product of two vectors.
? Compute the dot product of $a and $b.
> [1, 2], [3, 4]
return sum(x * y for x, y in zip($a, $b))
--
$total = 0
for x, y in zip($a, $b):
    $total += x * y
return $total

@ add_vectors vector_add(a: list[float], b: list[float]) -> list[float]
? Add two vectors element by element.
> [1, 2], [3, 4]
return [x + y for x, y in zip($a, $b)]

@ norm vector_norm(v: list[float]) -> float
? Return the Euclidean norm of a vector.
> [3, 4]
return sum(x * x for x in v) ** 0.5

@ transpose transpose_matrix(matrix: list[list[float]]) -> list[list[float]]
? Return the transpose of a matrix.
> [[1, 2], [3, 4]]
return [list(row) for row in zip(*$matrix)]
--
rows, columns = len($matrix), len($matrix[0])
return [[$matrix[i][j] for i in range(rows)] for j in range(columns)]

@ matrix_multiply matmul multiply_matrices(a: list[list[float]], b: list[list[float]]) -> list[list[float]]
? Return the product of two matrices.
? Multiply two matrices.
> [[1, 2], [3, 4]], [[0, 1], [1, 0]]
rows, inner, columns = len($a), len($b), len($b[0])
$result = [[0] * columns for _ in range(rows)]
for i in range(rows):
    for j in range(columns):
        for k in range(inner):
            $result[i][j] += $a[i][k] * $b[k][j]
return $result

@ identity_matrix identity(n: int) -> list[list[int]]
? Return the identity matrix of size $n.
> 2
return [[1 if i == j else 0 for j in range($n)] for i in range($n)]

@ permutations all_permutations(items: list) -> list[list]
? Return all permutations of $items.
> [1, 2, 3]
if len($items) <= 1:
    return [list($items)]
$result = []
for i in range(len($items)):
    rest = $items[:i] + $items[i + 1:]
    for permutation in $f(rest):
        $result.append([$items[i]] + permutation)
return $result

@ subsets power_set(items: list) -> list[list]
? Return all subsets of $items.
> [1, 2]
$result = [[]]
for $item in $items:
    $result += [subset + [$item] for subset in $result]
return $result

@ bfs breadth_first_search(graph: dict, start) -> list
? Return the nodes of a graph in breadth-first order from $start.
> {"a": ["b", "c"], "b": [], "c": []}, "a"
visited = [$start]
queue = [$start]
while queue:
    node = queue.pop(0)
    for neighbor in $graph[node]:
        if neighbor not in visited:
            visited.append(neighbor)
            queue.append(neighbor)
return visited

@ dfs depth_first_search(graph: dict, start) -> list
? Return the nodes of a graph in depth-first order from $start.
> {"a": ["b", "c"], "b": [], "c": []}, "a"
visited = []
stack = [$start]
while stack:
    node = stack.pop()
    if node not in visited:
        visited.append(node)
        stack.extend(reversed($graph[node]))
return visited

@ tree_depth max_depth(node) -> int
? Return the depth of a binary tree.
> 
if $node is None:
    return 0
return 1 + max($f($node.left), $f($node.right))

@ polynomial horner evaluate_polynomial(coefficients: list[float], x: float) -> float
? Evaluate a polynomial at $x with Horner's rule.
> [1, 2, 3], 2
$result = 0
for c in coefficients:
    $result = $result * $x + c
return $result

@ knapsack(weights: list[int], values: list[int], capacity: int) -> int
? Return the largest value that fits into a knapsack of the given capacity.
> [1, 2, 3], [6, 10, 12], 5
best = [0] * (capacity + 1)
for weight, value in zip(weights, values):
    for c in range(capacity, weight - 1, -1):
        best[c] = max(best[c], best[c - weight] + value)
return best[capacity]

@ coin_change count_change(coins: list[int], amount: int) -> int
? Count the ways to pay $amount with the given coins.
> [1, 2, 5], 5
ways = [1] + [0] * $amount
for coin in coins:
    for value in range(coin, $amount + 1):
        ways[value] += ways[value - coin]
return ways[$amount]
'''
