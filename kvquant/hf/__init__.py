"""Hugging Face transformers: its models decode from a kvquant cache, and are observed.

`import kvquant.hf` registers the attention "kvquant" in transformers and wraps its `generate`
(ids.py), and so does each name of kvquant that needs the hf extra. A bare `import kvquant` does
not: it loads no library.
"""

from ..errors import missing_extra

try:
    import transformers
    from transformers.cache_utils import CacheLayerMixin

    if not hasattr(CacheLayerMixin, "get_max_length"):
        raise ImportError(f"this is transformers {transformers.__version__}")
except ImportError as error:
    raise missing_extra(
        "Hugging Face models need transformers 5.14 or newer", "hf", error
    ) from error

from . import attention as attention  # registers "kvquant"
from . import ids as ids  # wraps generate
