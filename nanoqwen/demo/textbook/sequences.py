"""Textbook problems of number theory and recursion. The notation is explained in nanoqwen/demo/textbook/__init__.py."""

PROBLEMS = '''
@ fibonacci fibonacci fib nth_fibonacci(n: int) -> int
? Return the $n-th Fibonacci number.
? Compute the $n-th number of the Fibonacci sequence.
> 0 ; 1 ; 10
a, b = 0, 1
for _ in range($n):
    a, b = b, a + b
return a
--
if $n < 2:
    return $n
return $f($n - 1) + $f($n - 2)

@ fibonacci_list fibonacci_sequence first_fibonacci(count: int) -> list[int]
? Return a list of the first $count Fibonacci numbers.
> 8 ; 1
$result = []
a, b = 0, 1
for _ in range($count):
    $result.append(a)
    a, b = b, a + b
return $result
--
$result = [0, 1]
while len($result) < $count:
    $result.append($result[-1] + $result[-2])
return $result[:$count]

@ fibonacci_up_to(limit: int) -> list[int]
? Return all Fibonacci numbers up to $limit.
> 20
$result = []
a, b = 0, 1
while a <= $limit:
    $result.append(a)
    a, b = b, a + b
return $result

@ factorial factorial fact(n: int) -> int
? Return the factorial of $n.
? Compute $n factorial.
> 5 ; 0
$result = 1
for i in range(2, $n + 1):
    $result *= i
return $result
--
if $n <= 1:
    return 1
return $n * $f($n - 1)

@ gcd gcd greatest_common_divisor(a: int, b: int) -> int
? Return the greatest common divisor of $a and $b.
? Compute the greatest common divisor of two integers.
> 12, 18 ; 7, 3
while $b:
    $a, $b = $b, $a % $b
return $a
--
if $b == 0:
    return $a
return $f($b, $a % $b)

@ lcm least_common_multiple(a: int, b: int) -> int
? Return the least common multiple of $a and $b.
> 4, 6
x, y = $a, $b
while y:
    x, y = y, x % y
return $a * $b // x

@ is_prime is_prime prime is_prime_number(n: int) -> bool
? Return True if $n is a prime number.
? Check whether $n is prime.
? Check if a number is prime.
> 7 ; 9 ; 1
if $n < 2:
    return False
for i in range(2, int($n ** 0.5) + 1):
    if $n % i == 0:
        return False
return True
--
if $n < 2:
    return False
divisor = 2
while divisor * divisor <= $n:
    if $n % divisor == 0:
        return False
    divisor += 1
return True

@ primes_up_to sieve primes sieve_of_eratosthenes(limit: int) -> list[int]
? Return all prime numbers up to $limit.
? Find the primes up to $limit with the sieve of Eratosthenes.
> 20 ; 2
is_prime = [True] * ($limit + 1)
is_prime[0:2] = [False, False]
for i in range(2, int($limit ** 0.5) + 1):
    if is_prime[i]:
        for j in range(i * i, $limit + 1, i):
            is_prime[j] = False
return [i for i in range($limit + 1) if is_prime[i]]

@ first_primes(count: int) -> list[int]
? Return the first $count prime numbers.
> 5
primes = []
candidate = 2
while len(primes) < $count:
    if all(candidate % p != 0 for p in primes):
        primes.append(candidate)
    candidate += 1
return primes

@ prime_factors factorize(n: int) -> list[int]
? Return the prime factors of $n in ascending order.
? Compute the prime factorization of $n.
> 12 ; 13
factors = []
divisor = 2
while $n > 1:
    while $n % divisor == 0:
        factors.append(divisor)
        $n //= divisor
    divisor += 1
return factors

@ divisors get_divisors(n: int) -> list[int]
? Return all divisors of $n.
> 12
return [i for i in range(1, $n + 1) if $n % i == 0]
--
$result = []
for i in range(1, $n + 1):
    if $n % i == 0:
        $result.append(i)
return $result

@ is_perfect is_perfect_number(n: int) -> bool
? Check whether $n equals the sum of its proper divisors.
> 6 ; 8
$total = 0
for i in range(1, $n):
    if $n % i == 0:
        $total += i
return $total == $n

@ power pow_int(base: float, exponent: int) -> float
? Return $base raised to the power $exponent.
? Compute $base to the power of $exponent.
> 2, 10 ; 3, 0
$result = 1
while $exponent > 0:
    if $exponent % 2 == 1:
        $result *= $base
    $base *= $base
    $exponent //= 2
return $result
--
$result = 1
for _ in range($exponent):
    $result *= $base
return $result

@ mod_pow modular_power(base: int, exponent: int, modulus: int) -> int
? Compute $base to the power of $exponent modulo $modulus.
> 2, 10, 1000
$result = 1
$base %= $modulus
while $exponent > 0:
    if $exponent % 2 == 1:
        $result = $result * $base % $modulus
    $base = $base * $base % $modulus
    $exponent //= 2
return $result

@ is_armstrong is_armstrong_number(n: int) -> bool
? Check whether $n is the sum of its digits raised to the number of digits.
> 153 ; 10
digits = str($n)
return $n == sum(int(d) ** len(digits) for d in digits)

@ collatz collatz_sequence(n: int) -> list[int]
? Return the Collatz sequence that starts at $n.
> 6
$result = [$n]
while $n != 1:
    if $n % 2 == 0:
        $n = $n // 2
    else:
        $n = 3 * $n + 1
    $result.append($n)
return $result

@ collatz_steps collatz_length(n: int) -> int
? Count the steps that the Collatz sequence needs from $n to 1.
> 6 ; 1
steps = 0
while $n != 1:
    $n = $n // 2 if $n % 2 == 0 else 3 * $n + 1
    steps += 1
return steps

@ binomial combinations choose(n: int, k: int) -> int
? Return the number of ways to choose $k items out of $n.
? Compute the binomial coefficient of $n and $k.
> 5, 2
$result = 1
for i in range($k):
    $result = $result * ($n - i) // (i + 1)
return $result

@ pascal_triangle pascals_triangle(n: int) -> list[list[int]]
? Return the first $n rows of Pascal's triangle.
> 4
rows = []
for i in range($n):
    row = [1] * (i + 1)
    for j in range(1, i):
        row[j] = rows[i - 1][j - 1] + rows[i - 1][j]
    rows.append(row)
return rows

@ hanoi tower_of_hanoi(n: int, source: str, target: str, spare: str) -> list
? Return the moves that solve the Tower of Hanoi with $n disks.
> 2, "A", "C", "B"
if $n == 0:
    return []
moves = $f($n - 1, source, spare, target)
moves.append((source, target))
moves += $f($n - 1, spare, target, source)
return moves

@ ackermann(m: int, n: int) -> int
? Compute the Ackermann function.
> 2, 3
if m == 0:
    return $n + 1
if $n == 0:
    return $f(m - 1, 1)
return $f(m - 1, $f(m, $n - 1))
'''
