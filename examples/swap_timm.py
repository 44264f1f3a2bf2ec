"""Swap a timm ViT to half the attention heads with two keys each, fine-tune, save and load it.

The new model is trained on the outputs of the old one; use your own data instead.
"""

import copy
import json

import timm
import torch

import lit_probattn

torch.manual_seed(0)
sizes = {"img_size": 64, "num_heads": 4, "num_classes": 10}  # and pretrained=True
model = timm.create_model("vit_tiny_patch16_224", **sizes).eval()
teacher = copy.deepcopy(model)
model, report = lit_probattn.swap(model, "mgk", heads=0.5)
print(report)

pictures = torch.randn(8, 3, 64, 64)
with torch.no_grad():
    target = teacher(pictures)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)  # created after the swap
for step in range(21):
    loss = (model(pictures) - target).square().mean() / target.square().mean()
    if step % 10 == 0:
        print(f"step {step}: squared error {loss.item():.4f}, relative to the outputs")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

torch.save(model.state_dict(), "swapped.pt")
with open("swapped.json", "w") as file:
    json.dump(report.recipe, file)
fresh = timm.create_model("vit_tiny_patch16_224", **sizes).eval()
with open("swapped.json") as file:
    lit_probattn.swap(fresh, json.load(file))
fresh.load_state_dict(torch.load("swapped.pt"))
print("loaded again, equal:", torch.equal(fresh(pictures), model(pictures)))
