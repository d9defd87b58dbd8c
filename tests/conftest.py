"""pytest puts the folder of this file on the import path, so every test can write ``import tiny``."""

import os

# Before torch is imported anywhere: on a small machine, two OpenMP threads that wait for each other cost a tiny model
# far more than they bring (measured on the generate tests beside other work: 52 s with two, 7 s with one).
os.environ.setdefault("OMP_NUM_THREADS", "1")
