"""Inspect your own table of texts and train a classifier on it.

The table is generated unless there is a file `reviews.csv`. The same on the command line:

    lit-probattn data check reviews.csv
    lit-probattn fit --task own_texts --attention smgk --data.path reviews.csv
"""

import random
from functools import partial
from pathlib import Path

import lightning.pytorch as pl

from datamodules import LabelledTexts
from datamodules.core.report import outline
from lit_probattn.attention import MGKAttention
from lit_probattn.tasks import SequenceClassifier

random.seed(0)
words = {"good": ["great", "lovely", "fine"], "bad": ["awful", "dull", "poor"]}
if not Path("reviews.csv").exists():
    labels = random.choices(list(words), k=300)
    texts = (f"film {n} was {random.choice(words[label])} to see" for n, label in enumerate(labels))
    rows = map(",".join, zip(texts, labels, strict=True))
    Path("reviews.csv").write_text("\n".join(["review,sentiment", *rows]))

data = LabelledTexts(path="reviews.csv", tokens="words", max_length=32, batch_size=16)
data.prepare_data()
data.setup()
print(*outline(data), sep="\n")

attention = partial(MGKAttention, num_heads=2, shifted_keys=True)
sizes = {name: getattr(data, name) for name in ("vocab_size", "num_classes", "max_seq_len")}
model = SequenceClassifier(attention, embed_dim=32, head_dim=16, num_layers=1, lr=1e-2, **sizes)
options = {"use_distributed_sampler": False, "logger": False, "enable_checkpointing": False}
trainer = pl.Trainer(max_steps=40, check_val_every_n_epoch=None, **options)
trainer.fit(model, data)
print(f"accuracy on the test split: {trainer.test(model, data)[0]['test/accuracy']:.2f}")
