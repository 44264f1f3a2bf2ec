"""Swap a Hugging Face BERT to half the heads with two keys each, train it; generate with a GPT-2.

The models are built from small configurations; `from_pretrained` models are swapped likewise.
"""

import torch
import transformers

import lit_probattn

torch.manual_seed(0)
sizes = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
config = transformers.BertConfig(**sizes, intermediate_size=128, num_labels=2)
model = transformers.BertForSequenceClassification(config)
model, report = lit_probattn.swap(model, "mgk", heads=0.5)
print(report)

tokens = torch.randint(5, 100, (64, 12))
labels = (tokens[:, 0] > tokens[:, 1]).long()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # created after the swap
for step in range(41):
    loss = model(input_ids=tokens, labels=labels).loss
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

sizes = {"vocab_size": 100, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)
writer = transformers.GPT2LMHeadModel(config).eval()
writer, report = lit_probattn.swap(writer, "mgk", heads=0.5)
options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
with_cache = writer.generate(tokens[:1], **options)
without = writer.generate(tokens[:1], **options, use_cache=False)
print("generated:", with_cache.shape[1] - 12, "equal without the cache:", with_cache.equal(without))
