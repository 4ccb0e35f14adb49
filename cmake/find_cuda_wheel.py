"""Print the folder of NVIDIA's PyPI packages that has this program in its bin (the newest CUDA major), or nothing."""

import importlib.util
import pathlib
import sys

spec = importlib.util.find_spec("nvidia")
roots = [
    root
    for base in (spec.submodule_search_locations or () if spec else ())
    for root in pathlib.Path(base).glob("cu[0-9]*")
]
for root in sorted(roots, key=lambda root: int(root.name[2:]), reverse=True):
    if (root / "bin" / sys.argv[1]).is_file():
        print(root.as_posix())
        break
