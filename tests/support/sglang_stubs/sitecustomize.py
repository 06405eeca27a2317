"""A stand-in for torchvision, which SGLang imports and does not need for text. torchvision's builds
on PyPI do not load beside torch's CPU build, and transformers would use torchvision. Python imports
this file at its start if PYTHONPATH names this folder and that of stand_ins.py."""

from stand_ins import stand_in_for

stand_in_for("torchvision")
