"""Textbook classes. The notation is explained in nanoqwen/demo/textbook/__init__.py."""

PROBLEMS = '''
@class Stack
? A last-in, first-out stack.
def __init__(self):
    self.items = []

def push(self, item):
    self.items.append(item)

def pop(self):
    if not self.items:
        raise IndexError("pop from an empty stack")
    return self.items.pop()

def peek(self):
    return self.items[-1]

def is_empty(self):
    return len(self.items) == 0

def __len__(self):
    return len(self.items)

@class Queue
? A first-in, first-out queue.
def __init__(self):
    self.items = []

def enqueue(self, item):
    self.items.append(item)

def dequeue(self):
    if not self.items:
        raise IndexError("dequeue from an empty queue")
    return self.items.pop(0)

def is_empty(self):
    return len(self.items) == 0

def __len__(self):
    return len(self.items)

@class Point
? A point in the plane.
def __init__(self, x, y):
    self.x = x
    self.y = y

def __repr__(self):
    return f"Point({self.x}, {self.y})"

def __eq__(self, other):
    return self.x == other.x and self.y == other.y

def __add__(self, other):
    return Point(self.x + other.x, self.y + other.y)

def distance(self, other):
    return ((self.x - other.x) ** 2 + (self.y - other.y) ** 2) ** 0.5

@class Vector
? A vector of numbers.
def __init__(self, values):
    self.values = list(values)

def __len__(self):
    return len(self.values)

def __getitem__(self, index):
    return self.values[index]

def __add__(self, other):
    return Vector(a + b for a, b in zip(self.values, other.values))

def dot(self, other):
    return sum(a * b for a, b in zip(self.values, other.values))

def norm(self):
    return self.dot(self) ** 0.5

@class Node
? A node of a singly linked list.
def __init__(self, value, next=None):
    self.value = value
    self.next = next

@class LinkedList
? A singly linked list.
def __init__(self):
    self.head = None
    self.size = 0

def push(self, value):
    self.head = (value, self.head)
    self.size += 1

def pop(self):
    if self.head is None:
        raise IndexError("pop from an empty list")
    value, self.head = self.head
    self.size -= 1
    return value

def __iter__(self):
    node = self.head
    while node is not None:
        value, node = node
        yield value

def __len__(self):
    return self.size

@class TreeNode
? A node of a binary search tree.
def __init__(self, value):
    self.value = value
    self.left = None
    self.right = None

def insert(self, value):
    if value < self.value:
        if self.left is None:
            self.left = TreeNode(value)
        else:
            self.left.insert(value)
    else:
        if self.right is None:
            self.right = TreeNode(value)
        else:
            self.right.insert(value)

def contains(self, value):
    if value == self.value:
        return True
    child = self.left if value < self.value else self.right
    return child is not None and child.contains(value)

@class Counter
? A counter that can be increased and reset.
def __init__(self, start=0):
    self.value = start

def increment(self, step=1):
    self.value += step
    return self.value

def reset(self):
    self.value = 0

@class BankAccount
? A bank account with a balance.
def __init__(self, owner, balance=0):
    self.owner = owner
    self.balance = balance

def deposit(self, amount):
    if amount <= 0:
        raise ValueError("amount must be positive")
    self.balance += amount

def withdraw(self, amount):
    if amount > self.balance:
        raise ValueError("insufficient funds")
    self.balance -= amount

def __repr__(self):
    return f"BankAccount({self.owner!r}, {self.balance})"

@class Rectangle
? A rectangle with a width and a height.
def __init__(self, width, height):
    self.width = width
    self.height = height

def area(self):
    return self.width * self.height

def perimeter(self):
    return 2 * (self.width + self.height)

@class Circle
? A circle with a radius.
def __init__(self, radius):
    self.radius = radius

def area(self):
    return 3.141592653589793 * self.radius ** 2

def circumference(self):
    return 2 * 3.141592653589793 * self.radius

@class Matrix
? A matrix of numbers, stored as a list of rows.
def __init__(self, rows):
    self.rows = [list(row) for row in rows]

def __getitem__(self, index):
    return self.rows[index]

def transpose(self):
    return Matrix(zip(*self.rows))

def __matmul__(self, other):
    columns = list(zip(*other.rows))
    return Matrix([[sum(a * b for a, b in zip(row, column)) for column in columns] for row in self.rows])

@class LRUCache
? A cache that forgets the entry that was used least recently.
def __init__(self, capacity):
    self.capacity = capacity
    self.entries = {}

def get(self, key, default=None):
    if key not in self.entries:
        return default
    value = self.entries.pop(key)
    self.entries[key] = value
    return value

def put(self, key, value):
    self.entries.pop(key, None)
    if len(self.entries) >= self.capacity:
        oldest = next(iter(self.entries))
        del self.entries[oldest]
    self.entries[key] = value

@class Person
? A person with a name and an age.
def __init__(self, name, age):
    self.name = name
    self.age = age

def __repr__(self):
    return f"Person({self.name!r}, {self.age})"

def birthday(self):
    self.age += 1

@class Graph
? An undirected graph, stored as a dictionary of neighbor sets.
def __init__(self):
    self.neighbors = {}

def add_node(self, node):
    self.neighbors.setdefault(node, set())

def add_edge(self, a, b):
    self.add_node(a)
    self.add_node(b)
    self.neighbors[a].add(b)
    self.neighbors[b].add(a)

def degree(self, node):
    return len(self.neighbors[node])
'''
