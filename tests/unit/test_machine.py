"""Facts about a machine that are found in folders."""

from __future__ import annotations

import pytest

from nanoqwen import machine


@pytest.mark.parametrize(
    "variable, folder",
    [("CUDA_PATH", "include"), ("CUDA_HOME", "include"), ("CONDA_PREFIX", "targets/x86_64-linux/include"), (None, "nvidia/cuda_runtime/include"), (None, "nvidia/cu13/include")],
)
def test_where_the_headers_of_cuda_are_found(tmp_path, monkeypatch, variable, folder):
    for name in ("CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine.sys, "path", [str(tmp_path)])
    if variable:
        monkeypatch.setenv(variable, str(tmp_path))
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "cuda_fp16.h").touch()
    assert machine.cuda_header_folder() != str(tmp_path / folder), "one of the two is missing"
    (tmp_path / folder / "vector_types.h").touch()
    if variable or not (machine.Path("/usr/local/cuda/include/cuda_fp16.h")).is_file():  # a toolkit goes before wheels
        assert machine.cuda_header_folder() == str(tmp_path / folder)
