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
# CuPy with the compiler that it needs at run time. For CUDA 13 at versions that torch's CUDA build accepts too; a driver
# of CUDA 12 cannot run that build of torch anyway, so there only the other packages constrain.
for major in 12 13; do
  constraints='^-e '
  [ $major = 12 ] && constraints='^(-e |nvidia-|cuda-|triton)'
  { echo "# Written by 'make lock': CuPy for a driver with CUDA $major. Do not edit."
    printf 'cupy-cuda%sx[ctk]>=14.0\ncuda-bindings==%s.*\n' $major $major | compile -c <(grep -vE "$constraints" "$full") - ; } > requirements/cuda$major.txt
done
# The tests compile every kernel without a GPU: NVRTC alone, for Linux machines that have no driver.
{ echo "# Written by 'make lock': the run-time compiler, for tests on a machine without a driver. Do not edit."
  grep -hE '^(cuda-bindings|cuda-pathfinder|nvidia-cuda-nvrtc)' requirements/cuda13.txt; } > requirements/nvrtc.txt
