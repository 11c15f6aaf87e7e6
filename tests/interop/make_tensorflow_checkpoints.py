"""Makes tests/interop/tensorflow: small checkpoints written by TensorFlow itself, and their tensors as TensorFlow reads them back.

Needs a Python with TensorFlow, which the project does not; the files are committed, so nobody has to run it:

    python -m venv /tmp/tf && /tmp/tf/bin/pip install tensorflow-cpu safetensors
    /tmp/tf/bin/python tests/interop/make_tensorflow_checkpoints.py

Weights are random numbers of a fixed seed; variables have the names and shapes of google-research/electra and of
google-research/bert, with the slots of their AdamWeightDecayOptimizer.
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf
from safetensors.numpy import save_file

HERE = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "tensorflow"
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "barak",
    "walks",
    "lonute",
    "and",
    "selin",
    "reads",
    "back",
    ",",
    ".",
    "##s",
    "##a",
    "t",
    "h",
    "e",
]
ROWS = 24  # four more than there are words
EMBEDDING, POSITIONS = 8, 16
rng = np.random.default_rng(1)


def numbers(*shape: int) -> np.ndarray:
    return (0.2 * rng.standard_normal(shape)).astype(np.float32)


def dense(scope: str, inputs: int, outputs: int) -> dict[str, np.ndarray]:
    return {f"{scope}/kernel": numbers(inputs, outputs), f"{scope}/bias": numbers(outputs)}


def norm(scope: str, units: int) -> dict[str, np.ndarray]:
    return {f"{scope}/gamma": 1 + numbers(units), f"{scope}/beta": numbers(units)}


def embeddings(scope: str, width: int) -> dict[str, np.ndarray]:
    return {
        f"{scope}/embeddings/word_embeddings": numbers(ROWS, width),
        f"{scope}/embeddings/position_embeddings": numbers(POSITIONS, width),
        f"{scope}/embeddings/token_type_embeddings": numbers(2, width),
        **norm(f"{scope}/embeddings/LayerNorm", width),
    }


def layers(scope: str, count: int, hidden: int, intermediate: int) -> dict[str, np.ndarray]:
    variables = {}
    for number in range(count):
        layer = f"{scope}/encoder/layer_{number}"
        for part in ("query", "key", "value"):
            variables |= dense(f"{layer}/attention/self/{part}", hidden, hidden)
        variables |= dense(f"{layer}/attention/output/dense", hidden, hidden)
        variables |= norm(f"{layer}/attention/output/LayerNorm", hidden)
        variables |= dense(f"{layer}/intermediate/dense", hidden, intermediate)
        variables |= dense(f"{layer}/output/dense", intermediate, hidden)
        variables |= norm(f"{layer}/output/LayerNorm", hidden)
    return variables


def electra() -> dict[str, np.ndarray]:
    """Discriminator and generator, which share their embeddings."""
    return {
        **embeddings("electra", EMBEDDING),
        **dense("electra/embeddings_project", EMBEDDING, 16),
        **layers("electra", 2, 16, 32),
        **dense("discriminator_predictions/dense", 16, 16),
        **dense("discriminator_predictions/dense_1", 16, 1),
        **layers("generator", 2, 8, 16),
        **dense("generator_predictions/dense", 8, EMBEDDING),
        **norm("generator_predictions/LayerNorm", EMBEDDING),
        "generator_predictions/output_bias": numbers(ROWS),
    }


def bert() -> dict[str, np.ndarray]:
    return {
        **embeddings("bert", 16),
        **layers("bert", 2, 16, 32),
        **dense("bert/pooler/dense", 16, 16),
        **dense("cls/predictions/transform/dense", 16, 16),
        **norm("cls/predictions/transform/LayerNorm", 16),
        "cls/predictions/output_bias": numbers(ROWS),
        "cls/seq_relationship/output_weights": numbers(2, 16),
        "cls/seq_relationship/output_bias": numbers(2),
    }


def save(
    folder: Path, variables: dict[str, np.ndarray], *, slots: bool = False, kind=tf.float32, parts: int = 1
) -> None:
    """As TensorFlow 1 does. `slots`: those of Adam, for some; with `parts` tables are partitioned variables."""
    folder.mkdir(parents=True)

    def variable(name: str, value: np.ndarray) -> None:
        def initial(shape, dtype, partition_info=None):
            start = partition_info.var_offset if partition_info else [0] * len(shape)
            return tf.cast(value[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))], dtype)

        partitioner = tf.compat.v1.fixed_size_partitioner(parts) if parts > 1 and name.endswith("_embeddings") else None
        options = {"partitioner": partitioner, "use_resource": False}
        tf.compat.v1.get_variable(name, value.shape, kind, initializer=initial, **options)

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for name, value in variables.items():
            variable(name, value)
            if slots and ("layer_1" in name or "bias" in name):
                variable(f"{name}/adam_m", 0.01 * value)
                variable(f"{name}/adam_v", 0.01 * value**2)
        if slots:
            tf.compat.v1.train.get_or_create_global_step()
        session.run(tf.compat.v1.global_variables_initializer())
        saver = tf.compat.v1.train.Saver(save_relative_paths=True)
        prefix = saver.save(session, str(folder / "model.ckpt-7"), write_meta_graph=False)

    # as TensorFlow's own reader has them
    reader = tf.train.load_checkpoint(prefix)
    read_back = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if "adam_" not in name}
    wide = {
        name: np.asarray(value, value.dtype if name == "global_step" else np.float32)
        for name, value in read_back.items()
    }
    save_file(wide, folder / "expected.safetensors")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")


if __name__ == "__main__":
    shutil.rmtree(HERE, ignore_errors=True)
    save(HERE / "electra", electra(), slots=True)
    save(HERE / "bert", bert())
    (HERE / "bert" / "bert_config.json").write_text(
        '{"num_attention_heads": 4, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 20,\n'
        ' "max_position_embeddings": 16, "hidden_act": "gelu", "type_vocab_size": 2, "hidden_dropout_prob": 0.1}\n'
    )
    save(HERE / "partitioned", bert(), parts=3)
    save(HERE / "bfloat16", bert(), kind=tf.bfloat16)
