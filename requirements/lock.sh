#!/usr/bin/env bash
# Resolve requirements/*.in for Python 3.10 to 3.13 on Linux and macOS. Needs uv.
# torch's own NVIDIA wheels stay out of the lock: a CPU build of torch must not drag them in, and a CUDA
# build pins them itself. requirements/cuda*.txt hold what a machine with an NVIDIA driver gets on top.
set -eu
cd "$(dirname "$0")/.."
compile() {
  uv pip compile --universal --python-version 3.10 --no-annotate --no-header --no-emit-index-url --no-emit-find-links \
    --upgrade -q "$@"
}
full=$(mktemp)
trap 'rm -f "$full"' EXIT
compile requirements/lock.in -o "$full"
{ echo "# Written by 'make lock' from requirements/lock.in. Do not edit."
  grep -vE '^(nvidia-|cuda-|triton|-e )' "$full"; } > requirements/lock.txt
# CuPy with the compiler and headers it needs at run time, at versions that torch's CUDA build accepts too.
for major in 12 13; do
  { echo "# Written by 'make lock': CuPy for a driver with CUDA $major. Do not edit."
    echo "cupy-cuda${major}x[ctk]" | compile -c <(grep -v '^-e ' "$full") - ; } > requirements/cuda$major.txt
done
