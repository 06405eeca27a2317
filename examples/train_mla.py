"""Train a small model with latent attention (DeepSeek V3's), to calibrate it and to decode from it.
Calibration scores on the last quarter of the text (FILE: 15,000 tokens or more), left out here:
    python examples/train_mla.py FOLDER --text FILE --device cuda
    kvquant calibrate FOLDER --text FILE --context 384 -o plan.safetensors
--latents 512: rows as of the large models.
"""

import argparse
import math
from pathlib import Path

import torch
from transformers import AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

from kvquant.cli.demo import MODEL, TEXT

WIDTHS = {256: (384, 1024), 512: (768, 2048)}  # by latents: hidden and intermediate elements
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": None}
PARTS = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "num_mtp_layers": 0}
DEFAULTS = {"latents": 256, "steps": 800, "layers": 4, "batch": 8, "length": 512}


def main(folder: Path, text: Path, device: str, latents: int, layers: int, **counts: int) -> None:
    """Train on passages of so many tokens, and save the model with its tokenizer."""
    steps, batch, length = counts["steps"], counts["batch"], counts["length"]
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = torch.tensor(tokenizer(text.read_text(encoding="utf-8"))["input_ids"])
    ids = ids[: len(ids) - len(ids) // 4].to(device)
    sizes = {"num_hidden_layers": layers, "first_k_dense_replace": layers, "kv_lora_rank": latents}
    sizes["hidden_size"], sizes["intermediate_size"] = WIDTHS[latents]
    config = DeepseekV3Config(vocab_size=len(tokenizer), **sizes, **HEADS, **PARTS)
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
    for key, count in DEFAULTS.items():
        only = {"latents": WIDTHS}.get(key)
        parser.add_argument(f"--{key}", type=int, default=count, choices=only)
    main(**vars(parser.parse_args()))
