"""A transformers model decodes through ReplaySSM: a batch of prompts, then what it ran on."""

import torch
from transformers import AutoModelForCausalLM

import replayssm
from replayssm.hf import explain
from replayssm.tiny import tiny_model

PROMPTS = [b"def read_", b"class Server", b"import "]
BOS, PAD = 0, 255  # of the tiny models, whose token ids are bytes

model = AutoModelForCausalLM.from_pretrained(tiny_model("kda"), dtype=torch.float32)
replayssm.attach(model, fold_every=8)

longest = max(map(len, PROMPTS))
ids = torch.tensor([[*[PAD] * (longest - len(prompt)), BOS, *prompt] for prompt in PROMPTS])  # left-padded
out = model.generate(ids, attention_mask=(ids != PAD).long(), max_new_tokens=40, do_sample=False)
for row in out.tolist():
    print(repr(bytes(i for i in row if i not in (BOS, PAD)).decode("utf-8", "replace")))
print(explain(model))
