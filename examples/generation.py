"""Train a small language model with MGK attention on a sentence, then generate with a cache."""

from functools import partial

import torch

from lit_probattn.attention import MGKAttention
from lit_probattn.models.decoding import Sampling, generate
from lit_probattn.models.language_model import LanguageModel

torch.manual_seed(0)
TEXT = "the quick brown fox jumps over the lazy dog and the lazy dog sleeps. " * 8
letters = sorted(set(TEXT))
ids = torch.tensor([letters.index(letter) for letter in TEXT])

attention = partial(MGKAttention, num_heads=2, num_components=2)
sizes = {"embed_dim": 64, "head_dim": 16, "num_layers": 2, "mlp_dim": 128, "max_seq_len": 48}
model = LanguageModel(attention, vocab_size=len(letters), output="full", dropout=0.0, **sizes)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(61):
    starts = torch.randint(len(ids) - 49, (16,))
    inputs = torch.stack([ids[start : start + 48] for start in starts])
    targets = torch.stack([ids[start + 1 : start + 49] for start in starts])
    loss = model.token_losses(model(inputs), targets).mean()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

model.eval()
prompt = torch.tensor([[letters.index(letter) for letter in "the quick "]])
for sampling in (Sampling(), Sampling(temperature=0.8, top_k=5, seed=1)):
    found = generate(model, prompt, max_new_tokens=32, sampling=sampling)
    written = "".join(letters[number] for number in found.tokens[0])
    print(f"temperature {sampling.temperature}: the quick {written}")
print(f"cache: {found.cache_bytes} bytes")
