"""Train the three tiny byte-level hybrid models in this folder.

    python models/train.py --all --seconds 190 --out models      # all three at once, then results.json
    python models/train.py --model gdn --seconds 90 --out models/gdn
    python models/train.py --sample models/gdn --prompt "def "

Text: the Python standard library's own sources (PSF licence), found with `sysconfig`. Token id == byte
value; byte 0 stands before every file (bos and eos), byte 255 never occurs in UTF-8 and serves as padding.
A file is held out when the first byte of the SHA-256 of its relative path is below 26 (about 10%).

How results.json is made: a model trains for a time budget (AdamW, warm-up, cosine), is rounded to bf16,
saved, loaded again in fp32 and scored on all held-out bytes with a context of at most 512 bytes. The
baselines are compressors run on the same held-out bytes and n-gram models counted on the same training
bytes. Training is bound by time, so the number of steps, and the weights, depend on the machine.
"""

import argparse
import bz2
import datetime
import hashlib
import json
import lzma
import math
import platform
import subprocess
import sys
import sysconfig
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.kimi_linear import modeling_kimi_linear

CONTEXT = 512
BOS, PAD = 0, 255
SKIP = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3"}
KEEP_FP32 = ("A_log", "dt_bias", ".D")  # decay parameters stay fp32 in the file, as in the public checkpoints

COMMON: dict[str, Any] = dict(
    vocab_size=256, hidden_size=128, num_attention_heads=4, max_position_embeddings=2048,
    bos_token_id=BOS, eos_token_id=BOS, pad_token_id=PAD, initializer_range=0.05,
)  # fmt: skip
LINEAR, FULL = "linear_attention", "full_attention"
CONFIGS: dict[str, dict[str, Any]] = {
    "mamba2": dict(
        model_type="nemotron_h", num_key_value_heads=2, head_dim=32, intermediate_size=288,
        layers_block_type=[LINEAR, "mlp", LINEAR, FULL, "mlp", LINEAR, "mlp", LINEAR, FULL, "mlp"],
        mamba_num_heads=8, mamba_head_dim=32, ssm_state_size=64, n_groups=2, chunk_size=64,
    ),
    "gdn": dict(
        model_type="qwen3_5_text", num_key_value_heads=2, head_dim=32, intermediate_size=160,
        num_hidden_layers=6, layer_types=[LINEAR, LINEAR, FULL] * 2, tie_word_embeddings=True,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=64,
    ),
    "kda": dict(
        model_type="kimi_linear", num_key_value_heads=4, intermediate_size=208,
        num_hidden_layers=6, layer_types=[LINEAR, LINEAR, FULL] * 2, mlp_layer_types=["dense"] * 6,
        linear_num_heads=4, linear_head_dim=32,
        kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
    ),
}  # fmt: skip


def corpus(root: Path) -> tuple[bytes, bytes, dict[str, Any]]:
    """Training bytes, held-out bytes and a description of both."""
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        name = path.relative_to(root)
        if SKIP & set(name.parts) or name.name.startswith("_sysconfigdata"):
            continue
        data = path.read_bytes().replace(b"\r\n", b"\n")
        try:
            data.decode("utf-8")
        except UnicodeDecodeError:
            continue
        parts[hashlib.sha256(name.as_posix().encode()).digest()[0] < 26].append(bytes([BOS]) + data)
    train, held = b"".join(parts[False]), b"".join(parts[True])
    about = {
        "train_files": len(parts[False]), "train_bytes": len(train),
        "held_out_files": len(parts[True]), "held_out_bytes": len(held),
        "sha256_train": hashlib.sha256(train).hexdigest(), "sha256_held_out": hashlib.sha256(held).hexdigest(),
    }  # fmt: skip
    return train, held, about


def grams(x: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """At each position from `n` on: the n bytes before it, and those with its own byte, as integers."""
    context = np.zeros(len(x) - n, np.int64)
    for j in range(n):
        context = context << 8 | x[j : len(x) - n + j]
    return context, context << 8 | x[n:]


def look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    at = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


def ngram_bits(train: bytes, held: bytes, order: int) -> float:
    """Bits a byte of an n-gram model (order = n), Witten-Bell interpolation of all shorter orders."""
    t, h = (np.frombuffer(x, np.uint8).astype(np.int64) for x in (train, held))
    p = np.full(len(h), 1 / 256)
    for n in range(order):  # n bytes of context
        pairs, count = np.unique(grams(t, n)[1], return_counts=True)
        contexts, first = np.unique(pairs >> 8, return_index=True)
        total, kinds = np.add.reduceat(count, first), np.diff(np.append(first, len(pairs)))
        context, pair = grams(h, n)
        seen, k = look_up(contexts, total, context), look_up(contexts, kinds, context)
        p[n:] = np.where(seen > 0, (look_up(pairs, count, pair) + k * p[n:]) / np.maximum(seen + k, 1), p[n:])
    return float(-np.log2(p).mean())


def baselines(train: bytes, held: bytes) -> dict[str, float]:
    bits = {
        "gzip (zlib level 9)": len(zlib.compress(held, 9)) * 8 / len(held),
        "bzip2 (bz2 level 9)": len(bz2.compress(held, 9)) * 8 / len(held),
        "xz (lzma preset 9)": len(lzma.compress(held, preset=9)) * 8 / len(held),
    }
    return bits | {f"{n}-gram": ngram_bits(train, held, n) for n in (3, 5)}


_upstream_chunk_kda = modeling_kimi_linear.chunk_kimi_delta_attention


def chunk_kda(query, key, value, g, beta, initial_state=None, output_final_state=False, **kwargs):
    """The same function as upstream's chunked scan, for training (no state in or out), with chunks of 16.

    Per chunk, with G the running sum of the log decay and w_i the row written at step i,
        w_i = beta_i (v_i - (k_i exp G_i) S - sum_{j<i} A_ij w_j),   A_ij = sum_c k_ic k_jc exp(G_ic - G_jc)
    is a unit lower triangular system, solved for all chunks at once; only the walk over S is sequential.
    """
    batch, length, heads, dim = key.shape
    size = 16
    if initial_state is not None or output_final_state or length % size:
        state = {"initial_state": initial_state, "output_final_state": output_final_state}
        return _upstream_chunk_kda(query, key, value, g=g, beta=beta, **state, **kwargs)
    q, k, v, g, beta = (
        x.float().transpose(1, 2).reshape(batch, heads, length // size, size, -1)
        for x in (query, key, value, g, beta.unsqueeze(-1))
    )
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q = q * dim**-0.5
    total = g.cumsum(-2)
    later = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(1)
    decay = (total.unsqueeze(-2) - total.unsqueeze(-3)).masked_fill(later[..., None], -math.inf).exp()
    decayed_k = decay * k.unsqueeze(-3)
    a = (decayed_k * k.unsqueeze(-2)).sum(-1)
    p = (decayed_k * q.unsqueeze(-2)).sum(-1)
    solved = torch.linalg.solve_triangular(
        beta * a, beta * torch.cat([v, k * total.exp()], -1), upper=False, unitriangular=True
    )
    rows, reads = solved.split([v.shape[-1], dim], -1)
    q = q * total.exp()
    end = total[..., -1:, :]
    k = (k * (end - total).exp()).transpose(-1, -2)
    end = end.exp().transpose(-1, -2)
    state = v.new_zeros(batch, heads, dim, v.shape[-1])
    out = []
    for i in range(length // size):
        w = rows[:, :, i] - reads[:, :, i] @ state
        out.append(q[:, :, i] @ state + p[:, :, i] @ w)
        state = state * end[:, :, i] + k[:, :, i] @ w
    return torch.cat(out, 2).transpose(1, 2).to(query.dtype), None


def use_fast_kda(device: torch.device) -> None:
    """Check `chunk_kda` against upstream's function, values and gradients, then put it in its place."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 128, 2, 32, device=device, requires_grad=True) for _ in range(3))
    g = (-3 * torch.rand(2, 128, 2, 32, device=device) ** 4).requires_grad_()
    beta = torch.rand(2, 128, 2, device=device, requires_grad=True)
    results = []
    for scan in (_upstream_chunk_kda, chunk_kda):
        out = scan(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v, g, beta))])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.detach().abs().max()))
    modeling_kimi_linear.chunk_kimi_delta_attention = chunk_kda


@torch.no_grad()
def held_out_bits(model: PreTrainedModel, held: bytes, batch: int = 32) -> float:
    """Bits a byte over all of `held` but its first byte. Windows overlap by half; each byte is scored once."""
    data = torch.frombuffer(bytearray(held), dtype=torch.uint8).to(model.device)
    half, nats = CONTEXT // 2, 0.0
    starts = list(range(0, max(len(data) - 1 - half, 1), half))
    for i in range(0, len(starts), batch):
        index = torch.tensor(starts[i : i + batch], device=model.device)[:, None]
        index = index + torch.arange(CONTEXT + 1, device=model.device)
        window = data[index.clamp(max=len(data) - 1)].long()
        logits = model(input_ids=window[:, :-1], use_cache=False).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten(), reduction="none").view(-1, CONTEXT)
        counts = index[:, 1:] < len(data)
        counts[:, :half] &= index[:, :1] == 0
        nats += float((loss * counts).sum(dtype=torch.float64))
    return nats / math.log(2) / (len(data) - 1)


def train(name: str, args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(args.device)
    text, held, _ = corpus(args.corpus)
    if args.eval_bytes:
        held = held[: args.eval_bytes]
    if name == "kda":
        use_fast_kda(device)
    torch.manual_seed(args.seed)
    config = AutoConfig.for_model(**COMMON, **CONFIGS[name])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device).train()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=args.lr, betas=(0.9, 0.98), fused=device.type == "cuda",
    )  # fmt: skip
    torch.set_float32_matmul_precision("high")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    offsets = torch.arange(CONTEXT + 1, device=device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{name}: {parameters} parameters, {len(text)} training bytes, {device}", flush=True)

    begin = last = time.perf_counter()
    step, progress, losses = 0, 0.0, []
    while progress < 1:
        rate = args.lr * min(1, progress / 0.03) * (0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        window = data[torch.randint(len(data) - CONTEXT, (args.batch, 1), device=device) + offsets].long()
        logits = model(input_ids=window[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        step += 1
        if step % 10 == 0 and device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        progress = max((now - begin) / args.seconds, step / args.steps if args.steps else 0)
        if progress >= 1 or now - last > 10:
            last, bits = now, float(torch.stack(losses[-50:]).mean()) / math.log(2)
            print(f"{name}: {now - begin:5.0f} s  step {step:5d}  train {bits:.3f} bits/byte", flush=True)
            if not math.isfinite(bits):
                raise RuntimeError(f"{name}: loss is not finite at step {step}")

    seconds = time.perf_counter() - begin
    for key, parameter in model.named_parameters():
        if not key.endswith(KEEP_FP32):
            parameter.data = parameter.data.bfloat16()
    model.config.dtype = "bfloat16"
    model.save_pretrained(args.out)
    torch.set_float32_matmul_precision("highest")
    model = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32).to(device).eval()
    result = {
        "parameters": parameters, "file_bytes": (args.out / "model.safetensors").stat().st_size,
        "train_seconds": round(seconds, 1), "steps": step, "bytes_seen": step * args.batch * CONTEXT,
        "train_bits_per_byte_last_50_steps": round(bits, 4),
        "held_out_bits_per_byte": round(held_out_bits(model, held), 4),
    }  # fmt: skip
    (args.out / "training.json").write_text(json.dumps(result))
    print(f"{name}: {result}", flush=True)
    return result


def train_all(args: argparse.Namespace) -> None:
    """One process a model, all at once on the same device; the first failure stops all."""
    names = list(CONFIGS)
    command = [sys.executable, __file__]
    for key in ("corpus", "seconds", "steps", "batch", "lr", "seed", "device", "eval_bytes"):
        command += [f"--{key.replace('_', '-')}", str(getattr(args, key))]
    jobs = [subprocess.Popen([*command, "--model", name, "--out", str(args.out / name)]) for name in names]
    text, held, about = corpus(args.corpus)
    bits = {key: round(value, 4) for key, value in baselines(text, held).items()}
    try:
        while any(job.poll() is None for job in jobs) and not any(job.poll() for job in jobs):
            time.sleep(0.5)
    finally:
        for job in jobs:
            if job.poll() is None:
                job.terminate()
    if failed := [name for name, job in zip(names, jobs, strict=True) if job.wait()]:
        raise SystemExit(f"failed: {', '.join(failed)}")
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "note": "three processes shared the device",
        "versions": {"python": platform.python_version(), "torch": torch.__version__}
        | {"transformers": transformers.__version__},
        "corpus": about,
        "baselines_held_out_bits_per_byte": bits,
        "models": {},
    }  # fmt: skip
    for name in names:
        path = args.out / name / "training.json"
        results["models"][name] = json.loads(path.read_text())
        path.unlink()
    (args.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


def sample(directory: Path, prompt: str, length: int, temperature: float, seed: int) -> str:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    torch.manual_seed(seed)
    ids = torch.tensor([[BOS, *prompt.encode()]])
    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, **how)
    return bytes(out[0, 1:].tolist()).decode("utf-8", "replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", choices=CONFIGS, help="train one model into --out")
    what.add_argument("--all", action="store_true", help="train all three into folders of --out")
    what.add_argument("--sample", type=Path, metavar="DIR", help="print a continuation by a saved model")
    parser.add_argument("--out", type=Path, default=Path("models"))
    parser.add_argument("--corpus", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--seconds", type=float, default=90, help="training time of each model")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps (0: time alone decides)")
    parser.add_argument("--batch", type=int, default=64, help="windows of 512 bytes a step")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-bytes", type=int, default=0, help="score only so many held-out bytes (0: all)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    args = parser.parse_args()
    if args.sample:
        print(sample(args.sample, args.prompt, args.length, args.temperature, args.seed))
    elif args.all:
        train_all(args)
    else:
        train(args.model, args)


if __name__ == "__main__":
    main()
