"""Train a small model with latent attention (DeepSeek V3's), to calibrate it and to decode from it.

Calibration scores on the last quarter of the text, which is left out here:
    python examples/train_mla.py FOLDER --text FILE --device cuda
    kvquant calibrate FOLDER --text FILE --context 384 -o plan.safetensors
"""

import argparse
import math
from pathlib import Path

import torch
from transformers import AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

from kvquant.cli.demo import MODEL, TEXT

# fewer latents than hidden elements, as in the large models; no experts, no compressed queries
SIZES = {"hidden_size": 384, "intermediate_size": 1024, "q_lora_rank": None, "num_mtp_layers": 0}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "v_head_dim": 64}
LATENTS = {"kv_lora_rank": 256, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64}
DEFAULTS = {"steps": 800, "layers": 4, "batch": 8, "length": 512}


def main(
    folder: Path, text: Path, device: str, steps: int, layers: int, batch: int, length: int
) -> None:
    """Train on passages of so many tokens, and save the model with its tokenizer."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = torch.tensor(tokenizer(text.read_text(encoding="utf-8"))["input_ids"])
    ids = ids[: len(ids) - len(ids) // 4].to(device)
    sizes = {"num_hidden_layers": layers, "first_k_dense_replace": layers} | SIZES
    config = DeepseekV3Config(vocab_size=len(tokenizer), **sizes, **HEADS, **LATENTS)
    model = DeepseekV3ForCausalLM(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        share = min((step + 1) / 100, 0.55 + 0.45 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = 1e-3 * share
        starts = torch.randint(len(ids) - length, (batch, 1), device=device)
        passages = ids[starts + torch.arange(length, device=device)]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(passages, labels=passages, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f} nats a token", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--device", default="cpu")
    for name, count in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    main(**vars(parser.parse_args()))
