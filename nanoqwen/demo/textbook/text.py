"""Textbook problems about strings. The notation is explained in nanoqwen/demo/textbook/__init__.py."""

PROBLEMS = '''
@ reverse_string reverse_string reverse reverse_text(s: str) -> str
? Return the string $s reversed.
? Reverse a string.
> "abc" ; ""
return $s[::-1]
--
$result = ""
for $char in $s:
    $result = $char + $result
return $result

@ is_palindrome is_palindrome palindrome(s: str) -> bool
? Return True if $s reads the same forwards and backwards.
? Check whether a string is a palindrome.
? Check if $s is a palindrome.
> "level" ; "hello"
return $s == $s[::-1]
--
left, right = 0, len($s) - 1
while left < right:
    if $s[left] != $s[right]:
        return False
    left += 1
    right -= 1
return True

@ is_palindrome_phrase(s: str) -> bool
? Check whether $s is a palindrome, ignoring case and punctuation.
> "Never odd or even"
cleaned = [$char.lower() for $char in $s if $char.isalnum()]
return cleaned == cleaned[::-1]

@ count_vowels vowel_count number_of_vowels(s: str) -> int
? Count the vowels in $s.
? Return the number of vowels in a string.
> "education" ; "xyz"
count = 0
for $char in $s.lower():
    if $char in "aeiou":
        count += 1
return count
--
return sum(1 for $char in $s.lower() if $char in "aeiou")

@ remove_vowels strip_vowels(s: str) -> str
? Return $s without its vowels.
> "education"
return "".join($char for $char in $s if $char.lower() not in "aeiou")

@ count_words word_count number_of_words(s: str) -> int
? Count the words in $s.
? Return the number of words in a text.
> "one two  three" ; ""
return len($s.split())

@ word_frequencies count_words word_counts word_frequency(s: str) -> dict[str, int]
? Count how often each word occurs in $s.
? Return a dictionary that maps each word to its number of occurrences.
> "a b a"
counts = {}
for word in $s.split():
    counts[word] = counts.get(word, 0) + 1
return counts
--
counts = {}
for word in $s.lower().split():
    if word not in counts:
        counts[word] = 0
    counts[word] += 1
return counts

@ char_frequencies count_characters char_count letter_counts(s: str) -> dict[str, int]
? Count how often each character occurs in $s.
> "abca"
counts = {}
for $char in $s:
    counts[$char] = counts.get($char, 0) + 1
return counts

@ most_common_char most_frequent_char(s: str) -> str
? Return the character that occurs most often in $s.
> "banana"
counts = {}
for $char in $s:
    counts[$char] = counts.get($char, 0) + 1
return max(counts, key=counts.get)

@ first_unique_char first_non_repeating(s: str) -> str
? Return the first character that occurs only once in $s.
> "aabcb"
for $char in $s:
    if $s.count($char) == 1:
        return $char
return None

@ longest_word find_longest_word(s: str) -> str
? Return the longest word in $s.
? Find the longest word of a sentence.
> "the quick brown foxes"
return max($s.split(), key=len)
--
longest = ""
for word in $s.split():
    if len(word) > len(longest):
        longest = word
return longest

@ capitalize_words title_case capitalize(s: str) -> str
? Capitalize the first letter of each word in $s.
> "hello big world"
return " ".join(word.capitalize() for word in $s.split())

@ reverse_words reverse_word_order(s: str) -> str
? Return the words of $s in reverse order.
> "one two three"
return " ".join(reversed($s.split()))
--
words = $s.split()
return " ".join(words[::-1])

@ is_anagram are_anagrams anagram(first: str, second: str) -> bool
? Return True if $first and $second are anagrams.
? Check whether two words are anagrams of each other.
> "listen", "silent" ; "abc", "abd"
return sorted($first) == sorted($second)
--
counts = {}
for $char in $first:
    counts[$char] = counts.get($char, 0) + 1
for $char in $second:
    counts[$char] = counts.get($char, 0) - 1
return all(count == 0 for count in counts.values())

@ caesar_cipher caesar_encrypt shift_letters(s: str, shift: int) -> str
? Encode $s with a Caesar cipher of the given shift.
> "abc xyz", 3
$result = []
for $char in $s:
    if $char.isalpha():
        base = ord("A") if $char.isupper() else ord("a")
        $result.append(chr((ord($char) - base + $shift) % 26 + base))
    else:
        $result.append($char)
return "".join($result)

@ count_char count_letter(s: str, c: str) -> int
? Count how often the character $c occurs in $s.
> "banana", "a"
count = 0
for $char in $s:
    if $char == $c:
        count += 1
return count

@ remove_duplicates_str unique_chars(s: str) -> str
? Return $s with every repeated character removed.
> "banana"
$result = ""
for $char in $s:
    if $char not in $result:
        $result += $char
return $result

@ remove_spaces strip_spaces(s: str) -> str
? Remove all spaces from $s.
> "a b c"
return $s.replace(" ", "")

@ is_pangram(s: str) -> bool
? Check whether $s contains every letter of the alphabet.
> "The quick brown fox jumps over the lazy dog" ; "hello"
letters = set($s.lower())
return all($char in letters for $char in "abcdefghijklmnopqrstuvwxyz")

@ run_length_encode compress rle(s: str) -> str
? Return the run-length encoding of $s.
? Compress $s by writing each run of a character as the character and its length.
> "aaabcc"
if not $s:
    return ""
$result = []
count = 1
for i in range(1, len($s)):
    if $s[i] == $s[i - 1]:
        count += 1
    else:
        $result.append($s[i - 1] + str(count))
        count = 1
$result.append($s[-1] + str(count))
return "".join($result)

@ swap_case toggle_case(s: str) -> str
? Swap upper and lower case in $s.
> "Hello World"
$result = ""
for $char in $s:
    if $char.isupper():
        $result += $char.lower()
    else:
        $result += $char.upper()
return $result

@ is_balanced balanced_parentheses valid_parentheses(s: str) -> bool
? Check whether the brackets in $s are balanced.
> "([]{})" ; "(]"
stack = []
pairs = {")": "(", "]": "[", "}": "{"}
for $char in $s:
    if $char in "([{":
        stack.append($char)
    elif $char in pairs:
        if not stack or stack.pop() != pairs[$char]:
            return False
return not stack

@ longest_common_prefix common_prefix(words: list[str]) -> str
? Return the longest common prefix of a list of words.
> ["flower", "flow", "flight"] ; []
if not words:
    return ""
prefix = words[0]
for word in words[1:]:
    while not word.startswith(prefix):
        prefix = prefix[:-1]
return prefix

@ hamming_distance(first: str, second: str) -> int
? Count the positions at which two strings of equal length differ.
> "karolin", "kathrin"
if len($first) != len($second):
    raise ValueError("strings must have the same length")
return sum(a != b for a, b in zip($first, $second))

@ edit_distance levenshtein levenshtein_distance(first: str, second: str) -> int
? Return the Levenshtein distance between $first and $second.
? Compute the edit distance of two strings.
> "kitten", "sitting"
previous = list(range(len($second) + 1))
for i, a in enumerate($first, 1):
    current = [i]
    for j, b in enumerate($second, 1):
        cost = 0 if a == b else 1
        current.append(min(previous[j] + 1, current[j - 1] + 1, previous[j - 1] + cost))
    previous = current
return previous[-1]

@ longest_common_subsequence lcs lcs_length(first: str, second: str) -> int
? Return the length of the longest common subsequence of two strings.
> "abcde", "ace"
table = [[0] * (len($second) + 1) for _ in range(len($first) + 1)]
for i in range(1, len($first) + 1):
    for j in range(1, len($second) + 1):
        if $first[i - 1] == $second[j - 1]:
            table[i][j] = table[i - 1][j - 1] + 1
        else:
            table[i][j] = max(table[i - 1][j], table[i][j - 1])
return table[-1][-1]

@ is_substring contains(s: str, pattern: str) -> bool
? Check whether $pattern occurs in $s.
> "hello", "ell"
for i in range(len($s) - len($pattern) + 1):
    if $s[i:i + len($pattern)] == $pattern:
        return True
return False

@ extract_numbers find_numbers(s: str) -> list[int]
? Return all integers that occur in $s.
> "10 apples and 3 pears"
return [int(word) for word in $s.split() if word.isdigit()]

@ is_digits is_numeric(s: str) -> bool
? Check whether $s consists of digits only.
> "123" ; "12a"
return len($s) > 0 and all($char in "0123456789" for $char in $s)

@ greet hello say_hello(name: str) -> str
? Return a greeting for $name.
> "Ada"
return f"Hello, {$name}!"
--
return "Hello, " + $name + "!"

@ join_words join_strings(words: list[str], separator: str) -> str
? Join the words with $separator between them.
> ["a", "b"], "-"
$result = ""
for i, word in enumerate(words):
    if i > 0:
        $result += $separator
    $result += word
return $result

@ parse_csv_line split_csv(line: str) -> list[str]
? Split a line of comma-separated values into its fields.
> "a, b,c"
return [field.strip() for field in $line.split(",")]

@ count_lines line_count(path: str) -> int
? Count the lines of a text file.
> 
with open($path, encoding="utf-8") as file:
    return sum(1 for _ in file)

@ read_lines read_file_lines(path: str) -> list[str]
? Read a text file and return its lines without line ends.
> 
with open($path, encoding="utf-8") as file:
    return [line.rstrip("\\n") for line in file]

@ write_lines save_lines(path: str, lines: list[str]) -> None
? Write each string of a list as a line of a text file.
> 
with open($path, "w", encoding="utf-8") as file:
    for line in lines:
        file.write(line + "\\n")

@ print_hello_world hello_world main() -> None
? Print a greeting to the world.
> 
print("Hello, world!")

@ print_numbers print_range(n: int) -> None
? Print the numbers from 1 to $n.
> 
for i in range(1, $n + 1):
    print(i)

@ print_triangle draw_triangle(n: int) -> None
? Print a triangle of stars with $n rows.
> 
for i in range(1, $n + 1):
    print("*" * i)
'''
