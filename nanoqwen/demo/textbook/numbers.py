"""Textbook problems about numbers. The notation is explained in nanoqwen/demo/textbook/__init__.py."""

PROBLEMS = '''
@ is_even even(n: int) -> bool
? Return True if $n is even.
> 4 ; 5
return $n % 2 == 0

@ is_odd odd(n: int) -> bool
? Return True if $n is odd.
> 4 ; 5
return $n % 2 == 1

@ is_leap_year leap_year(year: int) -> bool
? Return True if $year is a leap year.
? Check whether a year is a leap year.
> 2000 ; 1900 ; 2024
return $year % 4 == 0 and ($year % 100 != 0 or $year % 400 == 0)
--
if $year % 400 == 0:
    return True
if $year % 100 == 0:
    return False
return $year % 4 == 0

@ sum_of_digits digit_sum(n: int) -> int
? Return the sum of the digits of $n.
> 1234 ; 0
$total = 0
while $n > 0:
    $total += $n % 10
    $n //= 10
return $total
--
return sum(int(digit) for digit in str($n))

@ count_digits number_of_digits(n: int) -> int
? Count the digits of $n.
> 1234 ; 7
return len(str(abs($n)))

@ reverse_number reverse_integer(n: int) -> int
? Return $n with its digits in reverse order.
> 123 ; 100
$result = 0
while $n > 0:
    $result = $result * 10 + $n % 10
    $n //= 10
return $result

@ sum_to_n sum_of_first_n triangular(n: int) -> int
? Return the sum of the integers from 1 to $n.
> 10 ; 100
return $n * ($n + 1) // 2
--
$total = 0
for i in range(1, $n + 1):
    $total += i
return $total

@ sum_of_squares(n: int) -> int
? Return the sum of the squares of the first $n integers.
> 3
return sum(i * i for i in range(1, $n + 1))
--
$total = 0
for i in range(1, $n + 1):
    $total += i ** 2
return $total

@ absolute absolute_value(x: float) -> float
? Return the absolute value of $x.
> -3 ; 2
if $x < 0:
    return -$x
return $x

@ sign sign_of(x: float) -> int
? Return the sign of $x as -1, 0 or 1.
> -3 ; 0 ; 2.5
if $x > 0:
    return 1
if $x < 0:
    return -1
return 0

@ clamp clip(x: float, low: float, high: float) -> float
? Return $x limited to the range from $low to $high.
> 5, 0, 3 ; -1, 0, 3
return max($low, min($x, $high))
--
if $x < $low:
    return $low
if $x > $high:
    return $high
return $x

@ add add_numbers(a: float, b: float) -> float
? Return the sum of $a and $b.
? Add two numbers.
> 2, 3
return $a + $b

@ subtract difference(a: float, b: float) -> float
? Return the difference of $a and $b.
> 5, 3
return $a - $b

@ multiply product(a: float, b: float) -> float
? Return the product of $a and $b.
? Multiply two numbers.
> 2, 3
return $a * $b

@ divide safe_divide(a: float, b: float) -> float
? Divide $a by $b and raise an error when $b is zero.
> 6, 3
if $b == 0:
    raise ValueError("division by zero")
return $a / $b

@ square squared(x: float) -> float
? Return the square of $x.
> 4
return $x * $x
--
return $x ** 2

@ cube cubed(x: float) -> float
? Return the cube of $x.
> 3
return $x ** 3

@ maximum max_of_two(a: float, b: float) -> float
? Return the larger of $a and $b.
> 2, 3
if $a > $b:
    return $a
return $b
--
return $a if $a > $b else $b

@ max_of_three(a: float, b: float, c: float) -> float
? Return the largest of three numbers.
> 1, 5, 3
largest = $a
if $b > largest:
    largest = $b
if $c > largest:
    largest = $c
return largest
--
return max($a, $b, $c)

@ square_root sqrt newton_sqrt(x: float) -> float
? Compute the square root of $x with Newton's method.
> 
guess = $x / 2 or 1.0
while abs(guess * guess - $x) > 1e-9:
    guess = (guess + $x / guess) / 2
return guess

@ integer_sqrt isqrt(n: int) -> int
? Return the largest integer whose square is not greater than $n.
> 17 ; 16
low, high = 0, $n
while low < high:
    mid = (low + high + 1) // 2
    if mid * mid <= $n:
        low = mid
    else:
        high = mid - 1
return low

@ is_perfect_square is_square(n: int) -> bool
? Check whether $n is a perfect square.
> 16 ; 15
root = int($n ** 0.5)
return root * root == $n

@ celsius_to_fahrenheit to_fahrenheit(celsius: float) -> float
? Convert a temperature from Celsius to Fahrenheit.
> 100
return $celsius * 9 / 5 + 32

@ fahrenheit_to_celsius to_celsius(fahrenheit: float) -> float
? Convert a temperature from Fahrenheit to Celsius.
> 212
return ($fahrenheit - 32) * 5 / 9

@ to_binary decimal_to_binary int_to_binary(n: int) -> str
? Convert $n to a string of binary digits.
> 10 ; 0
if $n == 0:
    return "0"
digits = []
while $n > 0:
    digits.append(str($n % 2))
    $n //= 2
return "".join(reversed(digits))
--
return bin($n)[2:]

@ from_binary binary_to_decimal binary_to_int(s: str) -> int
? Convert a string of binary digits to an integer.
> "1010"
$result = 0
for digit in $s:
    $result = $result * 2 + int(digit)
return $result

@ count_bits popcount hamming_weight(n: int) -> int
? Count the one bits in the binary form of $n.
> 13
count = 0
while $n:
    count += $n & 1
    $n >>= 1
return count
--
return bin($n).count("1")

@ is_power_of_two power_of_two(n: int) -> bool
? Check whether $n is a power of two.
> 8 ; 6
return $n > 0 and $n & ($n - 1) == 0

@ distance euclidean_distance(x1: float, y1: float, x2: float, y2: float) -> float
? Return the distance between two points in the plane.
> 0, 0, 3, 4
return ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5

@ area_of_circle circle_area(radius: float) -> float
? Return the area of a circle with the given radius.
> 
return 3.141592653589793 * $radius ** 2

@ area_of_rectangle rectangle_area(width: float, height: float) -> float
? Return the area of a rectangle.
> 3, 4
return $width * $height

@ fizzbuzz fizz_buzz(n: int) -> list[str]
? Return the FizzBuzz sequence from 1 to $n.
> 5
$result = []
for i in range(1, $n + 1):
    if i % 15 == 0:
        $result.append("FizzBuzz")
    elif i % 3 == 0:
        $result.append("Fizz")
    elif i % 5 == 0:
        $result.append("Buzz")
    else:
        $result.append(str(i))
return $result
'''
