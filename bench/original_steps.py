"""The first steps of the paper's recipe by the original code, on the rows that bench/first_steps.py wrote.

    python bench/first_steps.py rows --data SHARDS --out FOLDER --steps 4000 --of 4000 [KEY=VALUE]...
    git clone https://github.com/google-research/electra CHECKOUT
    python bench/original_steps.py CHECKOUT FOLDER [--seed 0]      (with numpy, tensorflow-cpu 2.21 and tf_keras alone)
    python bench/first_steps.py float32 …                          the same settings by our code, to be drawn beside it
    python bench/original_steps.py CHECKOUT FOLDER --replay 100    what was masked and sampled, and the weights before and after, for
                                                                   bench/original_replay.py; rows of encoder.dropout=0 alone

Its networks, masks, samples, losses, schedule, optimizer and clipping are its own, unchanged. What TensorFlow no longer has is put in its
place: contrib's layer norm (epsilon 1e-12), and the estimator, of which nothing but the names is used.
"""

import argparse
import json
import os
import sys
import time
import types
from pathlib import Path

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import numpy as np
import tensorflow.compat.v1 as tf

EVERY = 100


def layer_norm(inputs, begin_norm_axis, begin_params_axis, scope=None):
    assert begin_norm_axis == begin_params_axis == -1
    with tf.variable_scope(scope, "LayerNorm", [inputs]):
        width = inputs.shape[-1:]
        beta = tf.get_variable("beta", width, initializer=tf.zeros_initializer())
        gamma = tf.get_variable("gamma", width, initializer=tf.ones_initializer())
        mean, variance = tf.nn.moments(inputs, [-1], keepdims=True)
        return tf.nn.batch_normalization(inputs, mean, variance, beta, gamma, 1e-12)


def import_original(checkout: Path):
    contrib = types.ModuleType("tensorflow.contrib")
    contrib.layers = types.SimpleNamespace(layer_norm=layer_norm)
    sys.modules["tensorflow.contrib"] = contrib
    if not hasattr(tf, "estimator"):
        tf.estimator = types.SimpleNamespace(SessionRunHook=object)
    sys.path.insert(0, str(checkout))
    import configure_pretraining
    import run_pretraining

    from model import optimization

    model = run_pretraining.PretrainingModel
    get_fake_data = model._get_fake_data

    def keep_fake_data(self, inputs, mlm_logits):
        fake = get_fake_data(self, inputs, mlm_logits)
        self.kept = {
            "masked": inputs.input_ids,
            "positions": inputs.masked_lm_positions,
            "targets": inputs.masked_lm_ids,
            "weights": inputs.masked_lm_weights,
            "corrupted": fake.inputs.input_ids,
            "is_replaced": fake.is_fake_tokens,
        }
        return fake

    model._get_fake_data = keep_fake_data
    optimizer, build = optimization.AdamWeightDecayOptimizer, optimization.AdamWeightDecayOptimizer.__init__

    def keep_rate(self, learning_rate, **settings):
        optimizer.rate = learning_rate
        build(self, learning_rate, **settings)

    optimizer.__init__ = keep_rate
    return configure_pretraining.PretrainingConfig, model, optimization.create_optimizer, optimizer


def distinct_positions(logits, count, dtype):
    noise = -tf.log(-tf.log(tf.random.uniform(tf.shape(logits), 1e-9, 1.0)))
    return tf.cast(tf.math.top_k(logits + noise, count).indices, dtype)


def write_replay(session, given, feed, kept, update) -> None:
    saver = tf.train.Saver(tf.trainable_variables())
    steps: dict[str, list[np.ndarray]] = {name: [] for name in kept}
    for when in ("before", "after"):
        for step in range(given.replay if when == "after" else 0):
            values, _ = session.run([kept, update], feed(step))
            for name, value in values.items():
                steps[name].append(value)
        folder = given.out / when
        folder.mkdir(exist_ok=True)
        (folder / "vocab.txt").write_text((given.out / "vocab.txt").read_text())
        saver.save(session, str(folder / "model"), write_meta_graph=False)
    np.savez_compressed(given.out / "replay.npz", **{name: np.stack(values) for name, values in steps.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--distinct", action="store_true", help="positions without repetition, as many as ours")
    parser.add_argument("--replay", type=int, default=0, metavar="STEPS")
    given = parser.parse_args()
    settings = json.loads((given.out / "rows.json").read_text("utf-8"))
    rows = {name: np.load(given.out / f"{name}.npy", mmap_mode="r") for name in ("ids", "segments", "is_real")}
    config_class, model_class, create_optimizer, optimizer = import_original(given.checkout)
    tf.disable_eager_execution()
    tf.set_random_seed(given.seed)
    config = config_class("first-steps", str(given.out), **settings["original"])
    shape = rows["ids"].shape[1:]
    if given.distinct:
        config.max_predictions_per_seq = round(config.mask_prob * config.max_seq_length)
        tf.random.categorical = distinct_positions
    read = {name: tf.placeholder(tf.int32, shape) for name in rows}
    names = {"input_ids": "ids", "input_mask": "is_real", "segment_ids": "segments"}
    model = model_class(config, {theirs: read[ours] for theirs, ours in names.items()}, is_training=True)
    update = create_optimizer(
        model.total_loss,
        config.learning_rate,
        config.num_train_steps,
        weight_decay_rate=config.weight_decay_rate,
        warmup_steps=config.num_warmup_steps,
        lr_decay_power=config.lr_decay_power,
    )
    both = {
        "mlm_loss": model.mlm_output.loss,
        "rtd_loss": (model.total_loss - model.mlm_output.loss) / config.disc_weight,
    }
    found: dict[str, list[float]] = {name: [] for name in both}
    sums, began = dict.fromkeys(both, 0.0), time.monotonic()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        trained = sum(int(np.prod(it.shape)) for it in tf.trainable_variables())
        print(f"{trained:,} parameters", flush=True)
        if given.replay:
            kept = read | model.kept | both | {"rate": optimizer.rate}
            write_replay(session, given, lambda step: {read[name]: rows[name][step] for name in rows}, kept, update)
            return
        for step in range(len(rows["ids"])):
            values, _ = session.run([both, update], {read[name]: rows[name][step] for name in rows})
            sums = {name: sums[name] + values[name] for name in both}
            if (step + 1) % EVERY == 0:
                for name in both:
                    found[name].append(float(sums[name]) / EVERY)
                sums = dict.fromkeys(both, 0.0)
                way = f"original{'-distinct' * given.distinct}{f'-{given.seed}' if given.seed else ''}"
                (given.out / f"{way}.json").write_text(
                    json.dumps({"every": EVERY, "words": settings["words"], **found}) + "\n"
                )
                speed = (step + 1) / (time.monotonic() - began)
                print(
                    step + 1,
                    {name: round(values[-1], 4) for name, values in found.items()},
                    f"{speed:.2f} steps/s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
