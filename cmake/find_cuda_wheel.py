"""Print the folder that NVIDIA's PyPI packages installed the CUDA toolkit into (the newest major), or nothing."""

import importlib.util
import pathlib

spec = importlib.util.find_spec("nvidia")
roots = [
    root
    for base in (spec.submodule_search_locations or () if spec else ())
    for root in pathlib.Path(base).glob("cu[0-9]*")
]
for root in sorted(roots, key=lambda root: int(root.name[2:]), reverse=True):
    if (root / "bin" / "nvcc").is_file():
        print(root.as_posix())
        break
