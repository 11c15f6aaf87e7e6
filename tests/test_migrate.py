"""docs/migrate.md: every command of ours runs, in its order, on small stand-ins; every setting it names exists."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from electra.base.config import known_keys, recipe_names
from electra.finetuning.classification import ClassificationSettings
from electra.finetuning.plan import MethodSettings
from electra.finetuning.questions import SpanSettings
from electra.pretraining.settings import PretrainSettings
from helpers import electra, write_corpus
from test_docs import ROOT, commands, write_table

PAGE = (ROOT / "docs" / "migrate.md").read_text("utf-8")
SIZES = "encoder.layers=2 encoder.hidden=32 encoder.heads=2 encoder.intermediate=64 encoder.embedding=16 rows.length=16"


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_every_command_of_the_migration_page_runs(tmp_path, toy_model):
    """But for small networks, few steps and one seed."""
    (tmp_path / "corpus").mkdir()
    write_corpus(tmp_path / "corpus" / "text.txt", documents=60)
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [f"{before}{letter}" for before in ("", "##") for letter in "abcdefghijklmnopqrstuvwxyz"]
    (tmp_path / "vocab.txt").write_text("\n".join([*specials, *letters]) + "\n")
    shutil.copytree(ROOT / "tests" / "interop" / "tensorflow" / "electra", tmp_path / "electra_small")
    shutil.copytree(toy_model, tmp_path / "their-electra")
    (tmp_path / "my-table").mkdir()
    for number, name in enumerate(("my-table/train.csv", "my-table/dev.csv", "new-table.csv")):
        write_table(tmp_path / name, first=60 * number)
    for task, header, cells in (
        ("sst2", "sentence\tlabel", "{}\t{}"),
        ("cola", "sentence\tlabel", "{}\t{}"),
        ("rte", "sentence1\tsentence2\tlabel", "{}\tback\t{}"),
    ):
        labels = ("entailment", "not_entailment") if task == "rte" else ("0", "1")
        folder = tmp_path / "glue" / task
        folder.mkdir(parents=True)
        for split, count in (("train", 12), ("dev", 6)):
            rows = [cells.format(f"the {split} {row}", labels[row % 2]) for row in range(count)]
            (folder / f"{split}.tsv").write_text(header + "\n" + "\n".join(rows) + "\n")
    lines = commands(PAGE)
    assert {shlex.split(line)[1] for line in lines} == {
        "tokenizer", "prepare", "pretrain", "evaluate", "finetune", "import", "export", "predict", "detect",
    }  # fmt: skip
    for line in lines:
        words = shlex.split(re.sub(r"--seeds \d+", "--seeds 1", line))[1:]
        if words[0] == "pretrain":
            words = [word for word in words if not word.startswith(("train.steps=", "schedule.warmup="))]
            words += [
                "train.steps=6",
                "train.batch=2",
                "schedule.warmup=2",
                *(["rows.length=16"] if "start=" in line else SIZES.split()),
            ]
        elif words[0] == "finetune":
            words = [word for word in words if not word.startswith(("length=", "epochs="))] + [
                "length=16",
                "epochs=1",
                "min_steps=0",
            ]
        done = electra(*words, cwd=tmp_path)
        assert done.returncode == 0, f"{line}: {done.stderr}"


def test_every_setting_of_the_migration_page_exists():
    known = known_keys(PretrainSettings)
    sections = {key.partition(".")[0] for key in known if "." in key}
    named = set(re.findall(r"`((?:" + "|".join(sections) + r")\.[a-z_.]+)(?:=[^`]*)?`", PAGE))
    assert len(named) > 30 and not named - known.keys()
    flat = {*MethodSettings.model_fields, *ClassificationSettings.model_fields, *SpanSettings.model_fields}
    for word in [
        "lr",
        "layer_decay",
        "layer_decay_kind",
        "epochs",
        "warmup",
        "weight_decay",
        "length",
        "batch",
        "head",
        "answerability",
        "null_threshold",
        "n_best",
        "metric",
        "beam",
        "keep",
        "patience",
        "track",
        "schedule",
    ]:
        assert word in flat and f"`{word}" in PAGE
    for names in re.findall(r"`((?:electra-[a-z-]+)?\+[a-z-]+|electra-[a-z-]+|tiny)`", PAGE):
        assert {name for name in names.split("+") if name} <= set(recipe_names()), names


THEIRS = """
corpus-dir vocab-file output-dir max-seq-length num-processes blanks-separate-docs no-lower-case no-strip-accents
debug do_train do_eval electra_objective gen_weight disc_weight mask_prob learning_rate lr_decay_power weight_decay_rate num_warmup_steps
iterations_per_loop save_checkpoints_steps num_train_steps num_eval_steps model_size model_hparam_overrides embedding_size vocab_size do_lower_case
uniform_generator untied_generator_embeddings untied_generator generator_layers generator_hidden_size disallow_correct temperature max_seq_length
train_batch_size eval_batch_size use_tpu pretrain_tfrecords vocab_file max_predictions_per_seq model_name data_dir
log_examples num_trials keep_all_models task_names layerwise_lr_decay num_train_epochs warmup_proportion use_tfrecords_if_existing write_test_outputs
n_writes_test predict_batch_size double_unordered max_query_length doc_stride n_best_size max_answer_length answerable_classifier
answerable_uses_start_logits answerable_weight joint_prediction beam_size qa_na_threshold init_checkpoint
output_dir max_steps per_device_train_batch_size gradient_accumulation_steps weight_decay adam_beta1 max_grad_norm lr_scheduler_type warmup_ratio bf16
fp16 gradient_checkpointing optim dataloader_num_workers group_by_length fsdp deepspeed metric_for_best_model do_predict overwrite_output_dir report_to
device base_run_name seed adam_bias_correction schedule sampling electra_mask_style tie_gen_in_out_embedding gen_smooth_label disc_smooth_label size my_model
"""
"""What people look for: flags of Google's three scripts, of the Trainer and of electra_pytorch."""


def test_every_option_of_theirs_is_in_the_left_column():
    left = {word for row in re.findall(r"^\|([^|]*)\|", PAGE, re.MULTILINE) for word in re.findall(r"[\w-]{2,}", row)}
    assert not {it for it in THEIRS.split() if it not in left and f"--{it}" not in left}


def test_the_links_between_their_names_and_ours_are_one_row_each():
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        rows = [line.strip("|").split("|") for line in table.splitlines()]
        assert len({len(row) for row in rows}) == 1, Path(rows[0][0])
