"""One rank of a transformers.Trainer that evaluates and predicts, first with accelerate's functions, then with ours.

Usage: torchrun trainer.py FOLDER

Each rank writes the differences, and the names of the called functions, to ``FOLDER/KIND-RANK.json``. The models are
tiny and random.
"""

import copy
import functools
import json
import os
import sys
from pathlib import Path

import accelerate
import numpy as np
import torch
import transformers
from torch import nn
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

import easydist.accelerate

SAMPLES = 11
WORDS = 50
TINY = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
NOT_MEASURED = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


# --- models and data


class Samples(torch.utils.data.Dataset):
    """Texts whose lengths differ unless one is given, so that ranks pad to different lengths."""

    def __init__(self, labels, length=None):
        generator = torch.Generator().manual_seed(0)
        self.items = []
        for i in range(SAMPLES):
            ids = torch.randint(3, WORDS, (length or 3 + (5 * i) % 7,), generator=generator)
            item = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            self.items.append(item if labels is None else item | {"labels": labels(i, ids)})

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def collate(items):
    filling = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    batch = {}
    for key in items[0]:
        values = [item[key] for item in items]
        if torch.is_tensor(values[0]) and values[0].ndim:
            batch[key] = nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=filling[key])
        else:
            batch[key] = torch.tensor(values)
    return batch


class Nested(nn.Module):
    """A model whose outputs are nested dicts and tuples, as those of older models."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.embedding(input_ids).mean(dim=1)
        logits = self.head(hidden)
        caches = tuple((hidden[:, None] * i, hidden[:, None] + i) for i in range(2))
        return {
            "loss": nn.functional.cross_entropy(logits, labels),
            "logits": logits,
            "past_key_values": caches,
            "right": logits.argmax(-1) == labels,
            "positive": logits > 0,  # bools with a dimension that the trainer pads
            "states": [hidden.bfloat16().float(), logits.half()],
        }


class LossOnly(Nested):
    """A model for which the trainer gathers an empty tuple."""

    def forward(self, input_ids, attention_mask=None, labels=None):
        return {"loss": super().forward(input_ids, attention_mask, labels)["loss"]}


def sequences():
    config = transformers.BertConfig(**TINY, intermediate_size=32, num_labels=3)
    samples = Samples(lambda i, ids: i % 3)
    bert = transformers.BertForSequenceClassification(config)
    yield "bert", bert, samples, {}
    yield "without labels", bert, Samples(None), {}
    yield "dispatched", bert, Samples(lambda i, ids: i % 3, 6), {"accelerator_config": {"dispatch_batches": True}}
    yield "inputs, too", bert, samples, {"include_for_metrics": ["inputs", "loss"]}
    yield "as objects", bert, Samples(lambda i, ids: i % 3, 6), {"eval_use_gather_object": True}
    yield "nested", Nested(), samples, {}
    yield "not joined", Nested(), samples, {"eval_do_concat_batches": False}
    yield "loss only", LossOnly(), samples, {}


def tokens():
    config = transformers.BertConfig(**TINY, intermediate_size=32, num_labels=4)
    samples = Samples(lambda i, ids: ids % 4)
    bert = transformers.BertForTokenClassification(config)
    yield "bert", bert, samples, {}
    yield "in halves", bert, samples, {"eval_accumulation_steps": 1, "bf16_full_eval": True}


def generation():
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    samples = Samples(lambda i, ids: ids.flip(0)[: 2 + i % 3])
    model = transformers.T5ForConditionalGeneration(config)
    yield "t5", model, samples, {"predict_with_generate": True, "generation_max_length": 9}
    yield "t5, two beams", model, samples, {"predict_with_generate": True, "generation_num_beams": 2}


# --- one trainer


def outcome(model, samples, folder, options):
    """Return all results of evaluate and predict, and the arguments of compute_metrics."""
    seen = []

    def metrics(prediction):
        seen.append((prediction.predictions, prediction.label_ids, prediction.inputs, prediction.losses))
        return {"count": len(seen)}

    generates = "predict_with_generate" in options
    arguments = (Seq2SeqTrainingArguments if generates else TrainingArguments)(
        output_dir=folder,
        use_cpu=True,
        per_device_eval_batch_size=2,
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    trainer = (Seq2SeqTrainer if generates else Trainer)(
        model=copy.deepcopy(model), args=arguments, eval_dataset=samples, data_collator=collate, compute_metrics=metrics
    )
    evaluated, predicted = trainer.evaluate(), trainer.predict(samples)
    found = {"evaluated": evaluated, "metrics": predicted.metrics, "seen": seen}
    found |= {"predictions": predicted.predictions, "label_ids": predicted.label_ids}
    assert arguments.world_size == accelerate.PartialState().num_processes == 2
    return found


def differences(one, other, path=""):
    """Yield the places where two results differ in type, dtype, shape or a single bit."""
    if type(one) is not type(other):
        yield f"{path}: {type(one).__name__}, {type(other).__name__}"
    elif isinstance(one, dict):
        for key in one.keys() | other.keys():
            if not str(key).endswith(NOT_MEASURED):
                yield from differences(one.get(key), other.get(key), f"{path}[{key!r}]")
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            yield f"{path}: lengths {len(one)}, {len(other)}"
        for i, (a, b) in enumerate(zip(one, other, strict=False)):
            yield from differences(a, b, f"{path}[{i}]")
    elif isinstance(one, np.ndarray):
        if (one.dtype, one.shape, one.tobytes()) != (other.dtype, other.shape, other.tobytes()):
            yield f"{path}: {one.dtype} {one.shape}, {other.dtype} {other.shape}, or other values"
    elif one != other:
        yield f"{path}: {one}, {other}"


# --- accelerate's functions and ours


def count(called):
    """Let easydist's functions record their calls, before they replace accelerate's."""
    ours = easydist.accelerate.FUNCTIONS
    ours |= {name: counted(function, name, called) for name, function in ours.items()}


def counted(function, name, called):
    @functools.wraps(function)
    def call(*args, **kwargs):
        called.add(name)
        return function(*args, **kwargs)

    return call


def main(folder):
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    cases = {kind.__name__: list(kind()) for kind in (sequences, tokens, generation)}
    called = set()
    theirs = {kind: outcomes(own, folder) for kind, own in cases.items()}
    count(called)
    easydist.accelerate.enable()
    for kind, own in cases.items():
        called.clear()
        found = {
            "cases": [name for name, *_ in own],
            "differences": list(differences(theirs[kind], outcomes(own, folder))),
            "called": sorted(called),
        }
        Path(folder, f"{kind}-{os.environ['RANK']}.json").write_text(json.dumps(found))


def outcomes(cases, folder):
    """Return the Trainer's results in each case."""
    torch.manual_seed(0)
    return {name: outcome(model, samples, folder, options) for name, model, samples, options in cases}


main(sys.argv[1])
