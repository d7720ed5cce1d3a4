"""PyPI's torchvision is built for CUDA: beside a CPU torch its operators are not registered, and it does not import.

Python imports a module of this name at its start. The operators are declared when torchvision is looked for.
"""

import importlib.abc
import sys

_kept = []  # an operator goes with its library


class _DeclareFirst(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _kept.append(library)


sys.meta_path.insert(0, _DeclareFirst())
