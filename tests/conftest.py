"""pytest puts the folder of this file on the import path, so every test can write ``import tiny``."""

import os

# Before torch is imported anywhere: the models of the tests are tiny, and on a busy machine OpenMP threads that wait for each
# other cost them many times more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")
