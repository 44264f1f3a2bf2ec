"""Train an attention layer in plain PyTorch: each token finds its pair and copies its colour."""

import torch
from torch import nn

import lit_probattn

torch.manual_seed(0)
NUM_THINGS, NUM_COLOURS, WIDTH = 8, 4, 32


def batch(size=64):
    """Return things with colours, followed by the same things in another order without colours."""
    things = torch.stack([torch.randperm(NUM_THINGS) for _ in range(size)])
    colours = torch.randint(NUM_COLOURS, (size, NUM_THINGS))
    order = torch.stack([torch.randperm(NUM_THINGS) for _ in range(size)])
    asked = torch.cat([things, things.gather(1, order)], dim=1)
    shown = torch.cat([colours, torch.full_like(colours, NUM_COLOURS)], dim=1)  # unknown
    return asked, shown, colours.gather(1, order)


thing, colour = nn.Embedding(NUM_THINGS, WIDTH), nn.Embedding(NUM_COLOURS + 1, WIDTH)
attention = lit_probattn.create("smgk", embed_dim=WIDTH, num_heads=2, dropout=0.0)
head = nn.Linear(WIDTH, NUM_COLOURS)
modules = nn.ModuleList([thing, colour, attention, head])
optimizer = torch.optim.AdamW(modules.parameters(), lr=1e-2)
for step in range(101):
    asked, shown, target = batch()
    x = thing(asked) + colour(shown)  # (B, 16, C)
    logits = head(x + attention(x))[:, NUM_THINGS:]  # (B, 8, colours)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    if step % 25 == 0:
        right = (logits.argmax(-1) == target).float().mean()
        print(f"step {step}: loss {loss.item():.3f}, {100 * right.item():.0f} % right")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("maps:", tuple(attention.weights(x).shape))  # (B, H, N, N)
