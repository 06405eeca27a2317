"""torchvision's names for SGLang, which imports them and needs none of them for text: its builds on
PyPI do not load beside torch's CPU build, and transformers would use it. Python imports this file
at its start, where PYTHONPATH names the folder, and the one of stand_ins.py."""

from stand_ins import stand_in_for

stand_in_for("torchvision")
