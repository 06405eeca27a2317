"""Tasks of lm-evaluation-harness on a quantized cache: python evaluate_lm_eval.py MODEL TASK ..."""

import argparse
from typing import Any

import torch

from kvquant import QuantizedCache

try:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise SystemExit(f"lm_eval is needed: pip install 'lm_eval[hf]' ({error})") from None

DRAFTS = 16  # tokens that each attend to the rows of the cache, as they would one by one


class QuantizedLM(HFLM):
    """HFLM whose every text is read into, and generated from, a cache of its own."""

    def __init__(self, formats: dict[str, str], **options: Any) -> None:
        super().__init__(**options)
        self.formats = formats
        self.model.set_attn_implementation("kvquant")

    def _model_call(self, inps: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """[batch, tokens] -> logits; one call would quantize nothing: a prompt meets itself."""
        cache, parts = QuantizedCache(self.model, **self.formats), inps.split(DRAFTS, dim=1)
        with torch.no_grad():
            found = [self.model(part, **cache.argument).logits for part in parts]
        cache.check()
        return torch.cat(found, dim=1)

    def _model_generate(self, *args: Any, **options: Any) -> torch.Tensor:
        cache = QuantizedCache(self.model, **self.formats)
        found = super()._model_generate(*args, **cache.argument, **options)
        cache.check()
        return found


def main() -> None:
    """Print the scores, of a 16-bit cache too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder")
    parser.add_argument("tasks", nargs="+", help="names, or YAML files of your own")
    parser.add_argument("--k-format", default="int4-g4")
    parser.add_argument("--v-format", default="int4-g4")
    parser.add_argument("--limit", type=int, help="documents of each task")
    given = vars(parser.parse_args())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"pretrained": given["model"], "device": device, "softmax_dtype": "float32"}
    formats = {name: given[name] for name in ("k_format", "v_format")}
    tasks = {"tasks": given["tasks"], "limit": given["limit"]}
    for name, lm in (("16 bit", HFLM(**options)), ("quantized", QuantizedLM(formats, **options))):
        print(name, lm_eval.simple_evaluate(model=lm, **tasks)["results"])


if __name__ == "__main__":
    main()
