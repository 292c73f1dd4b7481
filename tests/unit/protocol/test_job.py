"""The job file: what is accepted, and the one sentence for whatever is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from atoll.protocol.errors import JobError
from atoll.protocol.job import Job, dump_job, load_job, parse_job
from atoll.protocol.job_errors import key_paths
from atoll.protocol.job_model import GptOptions, ResNetOptions

JOB = """
model:
  builtin: gpt
  options: {layers: 2, width: 32, heads: 4, context: 16, vocabulary: 256}
data:
  text: stdlib
  sequence_length: 16
  validation: 0.1
training:
  steps: 5
  batch: 12
  microbatch: 2
  optimizer: {name: adamw, learning_rate: 1e-3, betas: [0.9, 0.95]}
  schedule: {warmup: 2, decay: cosine, final: 0.1}
  evaluate_every: 2
"""


@pytest.fixture
def job_path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny job.yaml"
    path.write_text(JOB)
    return path


def test_a_job_is_read_with_its_defaults(job_path: Path) -> None:
    job = load_job(job_path)

    assert job.name == "tiny-job"
    assert job.model.options == GptOptions(layers=2, width=32, heads=4, context=16)
    assert job.training.optimizer.learning_rate == 0.001
    assert job.training.num_microbatches == 6
    assert job.training.clip_norm is None
    assert (job.network.compression.forward, job.network.compression.backward) == ("auto", "auto")
    assert job.plan.stages == job.plan.in_flight == job.plan.recompute == "auto"


def test_the_size_of_a_microbatch_may_be_left_open(job_path: Path) -> None:
    job = load_job(job_path, ["training.microbatch=auto"])
    assert job.training.microbatch_sizes == (1, 2, 3, 4, 6, 12)
    decided = job.with_microbatch(4)
    assert decided.training.microbatch_sizes == (4,)
    assert decided.training.num_microbatches == 3
    assert parse_job(yaml.safe_load(dump_job(decided)), job_path.parent) == decided
    assert load_job(job_path, ["training.microbatch=4"]) == decided


def test_the_examples_are_valid() -> None:
    examples = Path(__file__).parents[3] / "examples"
    for name in ("gpt-bytes", "gpt2-huggingface", "random-bench", "resnet"):
        assert load_job(examples / f"{name}.yaml").name == name


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        # unknown keys
        ("training.step=20", "training.step: unknown key (value 20); did you mean 'steps'?"),
        ("model.options.head=5", "model.options.head: unknown key (value 5); did you mean 'heads'?"),
        ("steps=20", "steps: unknown key (value 20); it belongs at training.steps"),
        ("data.zebra=1", "data.zebra: unknown key (value 1); the keys here are text, tokens, images, arrays, random, "),
        # wrong types
        ("training.steps=many", "training.steps: 'many' is not a whole number; write a whole number, for example `steps: 60`"),
        ("training.steps=1.5", "training.steps: 1.5 is not a whole number; write a whole number, for example `steps: 60`"),
        ("training.steps=true", "training.steps: true is not a whole number; write a whole number, for example `steps: 60`"),
        ("training.steps=null", "training.steps: null is not a whole number; write a whole number, for example `steps: 60`"),
        (
            "training.clip_norm=tight",
            "training.clip_norm: 'tight' is not a number; write a number, for example `clip_norm: 1.0`",
        ),
        ("training.clip_norm=.inf", "training.clip_norm: .inf is not a finite number; write one, for example `clip_norm: 1.0`"),
        ("model.options.tied=1", "model.options.tied: 1 is not true or false; write true or false"),
        ("training.schedule=3", "training.schedule: 3 is not a group of keys; write warmup, decay and final below it"),
        (
            "training.optimizer.betas=0.9",
            "training.optimizer.betas: 0.9 is not a list; write a list, for example `betas: [",
        ),
        (
            "training.optimizer.betas=[0.9]",
            "training.optimizer.betas.1: [0.9] has too few items; write all of them, for example `betas: [0.9, 0.95]`",
        ),
        ("name=a b", "name: 'a b' is not a name; use up to 64 letters, digits, dots, hyphens and underscores"),
        ("data.tokenizer=7", "data.tokenizer: 7 is not text; write text, for example `tokenizer: bytes`"),
        ("plan.stages=0", "plan.stages: 0 is not possible; write auto or a whole number of at least 1"),
        ("plan.in_flight=many", "plan.in_flight: 'many' is not possible; write auto or a whole number of at least 1"),
        ("plan.recompute=maybe", "plan.recompute: 'maybe' is not possible; write auto, true or false"),
        # wrong values
        ("training.steps=0", "training.steps: 0 is too small; write at least 1"),
        ("data.validation=0.9", "data.validation: 0.9 is too large; write at most 0.5"),
        ("model.options.dropout=1.0", "model.options.dropout: 1.0 is too large; write less than 1.0"),
        ("network.link_seconds=0", "network.link_seconds: 0 is too small; write more than 0.0"),
        ("training.optimizer.name=adam", "training.optimizer.name: 'adam' is not known; did you mean 'adamw'?"),
        ("training.schedule.decay=cosin", "training.schedule.decay: 'cosin' is not known; did you mean 'cosine'?"),
        ("training.precision=int8", "training.precision: 'int8' is not known; choose 'fp32' or 'bf16'"),
        ("model.builtin=gtp", "model.builtin: 'gtp' is not known; did you mean 'gpt'?"),
        (
            "network.compression={floor: int9}",
            "network.compression.floor: 'int9' is no codec to choose from; did you mean 'int8'?",
        ),
        (
            "network.compression={forward: int8, backward: raw, floor: int8}",
            "network.compression.floor: 'int8' bounds nothing, for both directions are fixed; remove it",
        ),
        (
            "network.compression={floor: bf16, ceiling: int8}",
            "network.compression.floor: 'bf16' is less lossy than the ceiling 'int8'; exchange them",
        ),
        ("network.compression=bff16", "network.compression: 'bff16' is not a codec of this version; did you mean 'bf16'?"),
        (
            "network.compression={forward: raw, backward: gzip}",
            "network.compression.backward: 'gzip' is not a codec of this version; choose 'auto', 'raw', 'bf16', 'int8', "
            "'transform', 'transform-1.75', 'transform-1.5', 'transform-1', 'int4', 'transform-0.7', 'transform-0.5', 'int3', "
            "'int2', 'fp32', 'fp16', 'topk-10', 'topk-1', 'delta-4', 'delta-2' or 'adatopk'",
        ),
        (
            "durability.snapshot_every=0",
            "durability.snapshot_every: 0 is not possible; write auto or a whole number of at least 1",
        ),
        (
            "averaging.compression=powersgd",
            "averaging.compression: 'powersgd' is none of none, fp16, int8 and powersgd-RANK, for example powersgd-4",
        ),
        (
            "averaging.compression=fp16",
            "averaging.compression: fp16 needs the transport hivemind; set averaging.transport to hivemind, or use none or "
            "powersgd-4",
        ),
        (
            "averaging.outer_momentum=0.5",
            "averaging.outer_momentum: this key has no meaning for local_steps 1; set local_steps, for example to 10",
        ),
        (
            "averaging.local_steps=5",
            "training.batch: 12 samples make no 5 equal inner steps; make it a multiple of 10, training.microbatch times "
            "averaging.local_steps",
        ),
        # missing
        ("training={steps: 3}", "training.batch: this key is missing; add it, for example `batch: 16`"),
        ("model.builtin=null", "model: no model is given; give exactly one of builtin, huggingface or factory"),
        ("data.text=null", "data: no data is given; give exactly one of text, tokens, images, arrays or random"),
        ("data.random=tokens", "data: text and random are given; give exactly one of "),
        # relations
        (
            "training={steps: 3, batch: 2, evaluate_without_codecs: true}",
            "training.evaluate_without_codecs: true needs evaluations; set training.evaluate_every, for example to 20",
        ),
        ("training.microbatch=0", "training.microbatch: 0 is not possible; write auto or a whole number of at least 1"),
        ("training.microbatch=5", "training.microbatch: 5 does not divide training.batch (12); use 3, 4 or 6"),
        ("data.validation=0.0", "training.evaluate_every: 2 needs validation samples; set data.validation, for example"),
        ("model.options.heads=5", "model.options.heads: 5 does not divide model.options.width (32); use 2, 4 or 8"),
        ("data.sequence_length=17", "data.sequence_length: 17 is more than context 16 of model.options.context; lower it or"),
        ("model.options.vocabulary=99", "model.options.vocabulary: 99 is less than the 256 token ids of data.tokenizer; raise"),
        ("training.optimizer.momentum=0.9", "training.optimizer.momentum: 0.9 has no meaning for adamw; remove this key"),
        ("training.optimizer={name: sgd, nesterov: true}", "training.optimizer.nesterov: true needs a momentum above 0; set"),
        ("training.schedule.final=2", "training.schedule.final: 2 is too large; write at most 1.0"),
        ("model={builtin: resnet}", "data.text: this gives tokens, but model.builtin resnet trains on images"),
        # files
        ("data.text=absent.txt", "data.text: there is no file or folder '"),
        ("data.tokenizer=absent.json", "data.tokenizer: there is no file '"),
        ("model.weights=absent.safetensors", "model.weights: there is no file '"),
        ("model={factory: absent.py}", "model.factory: 'absent.py' does not name a function; write path/to/file.py:function"),
        ("model={factory: 'absent.py:make'}", "model.factory: there is no file '"),
        # overrides
        ("training.steps", "--set training.steps: write it as section.key=value, for example --set training.steps=20"),
        ("name.first=x", "name: 'tiny-job' is one value, so --set name.first has no place; set the whole of it"),
        ("training.steps=[", "--set training.steps=[, line 1 is not YAML: "),
    ],
)
def test_what_is_wrong_gives_one_sentence(job_path: Path, override: str, sentence: str) -> None:
    job_path.write_text(f"name: tiny-job\n{JOB}")

    with pytest.raises(JobError) as caught:
        load_job(job_path, [override])

    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)
    assert caught.value.field == sentence.split(": ")[0] or caught.value.field == ""


def test_an_override_is_read_as_yaml_and_the_last_one_wins(job_path: Path) -> None:
    job = load_job(
        job_path,
        [
            "training.steps=20",
            "training.steps=30",
            "training.optimizer.learning_rate=2e-4",
            "network.compression=bf16",
            "plan.stages=3",
        ],
    )

    assert job.training.steps == 30
    assert job.training.optimizer.learning_rate == 2e-4
    assert job.network.compression.backward == "bf16"
    assert job.plan.stages == 3


def test_paths_are_relative_to_the_job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "jobs"
    (folder / "texts").mkdir(parents=True)
    (folder / "model.py").write_text("")
    (folder / "job.yaml").write_text(
        "model: {factory: 'model.py:make', options: {layers: 2}}\ndata: {text: 'texts/*.txt'}\ntraining: {steps: 1, batch: 1}\n"
    )
    monkeypatch.chdir(tmp_path)

    job = load_job(Path("jobs/job.yaml"))

    assert job.model.factory_parts == (folder / "model.py", "make")
    assert job.model.options == {"layers": 2}
    assert job.data.text == str(folder / "texts/*.txt")


def test_a_dumped_job_is_read_back_from_anywhere(tmp_path: Path, job_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(b"")
    arrays = "data={arrays: {images: x.npy, labels: x.npy}, validation: 0.1}"
    lengths = "data={random: {lengths: [3, 5]}, sequence_length: 8, validation: 0.1}"
    for overrides in (
        [],
        [lengths],
        ["data.text=" + job_path.name],
        ["model={builtin: resnet}", arrays],
        ["network.compression=fp16"],
    ):
        job = load_job(job_path, overrides)
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        (tmp_path / "elsewhere" / "job.yaml").write_text(dump_job(job))

        again = load_job(tmp_path / "elsewhere" / "job.yaml")

        assert again == job
    assert isinstance(load_job(job_path, ["model={builtin: resnet}", arrays]).model.options, ResNetOptions)


def test_a_key_given_twice_is_refused(job_path: Path) -> None:
    job_path.write_text(JOB + "  steps: 6\n")

    with pytest.raises(JobError, match=r"^training\.steps: this key is given twice, again at line 16; keep one of them$"):
        load_job(job_path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty; a job has the keys model, data and training"),
        ("- a\n- b\n", "is not a job but [a, b]; a job has the keys model, data and training"),
        ("a: b: c\n", "line 1 is not YAML: mapping values are not allowed here; check the indentation and the quotes"),
        ("1: 2\n", "1: 1 is not a key; keys are words"),
    ],
)
def test_what_is_no_job_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "job.yaml").write_text(text)

    with pytest.raises(JobError) as caught:
        load_job(tmp_path / "job.yaml")

    assert str(caught.value).endswith(sentence)


def test_a_missing_or_binary_job_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"cannot read the job file .*: No such file or directory; give the path of a YAML file"):
        load_job(tmp_path / "absent.yaml")
    (tmp_path / "job.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(JobError, match="is not UTF-8 text; give the path of a YAML file"):
        load_job(tmp_path / "job.yaml")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("{random: {kind: images, lengths: [3]}}", "data.random.lengths: [3] has no meaning for random images; remove it"),
        (
            "{random: {lengths: [4, 300]}}",
            "data.random.lengths: 300 is more than context 16 of model.options.context; lower it or raise",
        ),
        (
            "{random: {lengths: 4}}",
            "data.random.lengths: 4 is not a list of lengths; write whole numbers, for example [64, 128, 33]",
        ),
        (
            "{random: {vocabulary: 300}, sequence_length: 4}",
            "model.options.vocabulary: 256 is less than the 300",
        ),
        ("{random: images}", "data.random: this gives images, but model.builtin gpt trains on tokens"),
        ("{arrays: {}}", "data.arrays: {} names no array; write for example {images: x.npy, labels: y.npy}"),
        ("{arrays: {images: absent.npy}}", "data.arrays.images: there is no file '"),
    ],
)
def test_data_of_other_kinds(job_path: Path, data: str, sentence: str) -> None:
    with pytest.raises(JobError) as caught:
        load_job(job_path, ["training.evaluate_every=null", f"data={data}"])

    assert str(caught.value).startswith(sentence)


def test_a_resnet_takes_coloured_images(job_path: Path) -> None:
    data = "data={random: {kind: images, channels: 1}, validation: 0.1}"
    with pytest.raises(JobError, match=r"^data\.random\.channels: 1 does not suit model\.builtin resnet; write 3$"):
        load_job(job_path, ["model={builtin: resnet}", data])


def test_every_key_is_documented_or_named_plainly() -> None:
    """A key whose meaning its name does not carry has a docstring, which becomes the field's description."""
    plain = {"name", "layers", "dropout", "decay", "depth", "classes", "precision", "weight_decay", "kind", "task"}
    untold = {"model", "data", "training", "network", "durability", "plan", "optimizer", "schedule", "builtin", "huggingface"}
    documented = 0
    for name, section in Job.model_fields.items():
        inner = section.annotation
        for key, field in getattr(inner, "model_fields", {}).items():
            documented += field.description is not None
            if name in ("training", "data", "network", "averaging"):
                assert field.description or key in plain | untold, f"{name}.{key} has no description"
    assert documented > 20


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("{", "model.huggingface.config: '{}' is not JSON ("),
        ("{}", "model.huggingface.config: '{}' has no model_type; give the config.json of a model"),
        (
            '{"model_type": "gpt2", "vocab_size": 100}',
            "model.huggingface.config: vocab_size 100 is less than the 256 token ids of data.tokenizer; raise it to 256",
        ),
        (
            '{"model_type": "gpt2", "vocab_size": 256, "n_positions": 8}',
            "data.sequence_length: 16 is more than n_positions 8 of model.huggingface.config; lower it or raise the context",
        ),
    ],
)
def test_a_hugging_face_configuration_is_checked(tmp_path: Path, job_path: Path, config: str, sentence: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(config)

    for given in ("config.json", "."):
        with pytest.raises(JobError) as caught:
            load_job(job_path, [f"model={{huggingface: {{config: {given}}}}}"])
        assert str(caught.value).startswith(sentence.replace("'{}'", repr(str(path))))


def test_a_hugging_face_model_takes_no_options(tmp_path: Path, job_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "empty").mkdir()
    model = "huggingface: {config: config.json}"

    assert load_job(job_path, [f"model={{{model}}}"]).model.input_kind == "tokens"
    with pytest.raises(JobError, match=r"^model\.options: \{layers: 2\} has no meaning for model\.huggingface; change"):
        load_job(job_path, [f"model={{{model}, options: {{layers: 2}}}}"])
    with pytest.raises(JobError, match=r"^model\.huggingface\.config: '.*empty' has no config\.json; give a folder"):
        load_job(job_path, ["model={huggingface: {config: empty}}"])


def test_every_key_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "job-file.md").read_text(encoding="utf-8")
    keys = {path.rpartition(".")[2] for path in key_paths(Job)} | set(GptOptions.model_fields) | set(ResNetOptions.model_fields)
    untold = [key for key in sorted(keys) if not re.search(rf"[`.{{ ]{key}[`:]", page)]

    assert untold == []


@pytest.mark.parametrize(
    ("pin", "stages"),
    [
        ({}, ()),
        ({"head": "attic"}, ()),
        ({0: ["attic", "lab"], 1: "cellar"}, (("attic", "lab"), ("cellar",))),
        ({"0": ["attic"]}, (("attic",),)),
    ],
)
def test_pins_name_modules_or_all_stages(
    pin: dict[object, object], stages: tuple[tuple[str, ...], ...], tmp_path: Path
) -> None:
    assert (
        parse_job(
            {
                "model": {"builtin": "gpt"},
                "data": {"text": "stdlib"},
                "training": {"steps": 1, "batch": 4},
                "plan": {"pin": pin},
            },
            tmp_path,
        ).plan.pinned_stages
        == stages
    )


@pytest.mark.parametrize(
    ("pin", "words"),
    [
        ({"head": ["attic", "lab"]}, r"plan.pin.head: a module is pinned to one peer; to name replicas, pin stages"),
        ({0: ["attic"], 2: ["lab"]}, r"plan.pin: pins of stages name all of them"),
        ({0: ["attic"], "head": "lab"}, r"plan.pin: pins of stages name all of them"),
        ({0: ["attic"], 1: ["attic"]}, r"plan.pin: .* each peer holds one stage"),
        ({0: []}, r"plan.pin: each stage needs at least one peer"),
    ],
)
def test_pins_that_make_no_sense(pin: dict[object, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=words):
        parse_job(
            {
                "model": {"builtin": "gpt"},
                "data": {"text": "stdlib"},
                "training": {"steps": 1, "batch": 4},
                "plan": {"pin": pin},
            },
            tmp_path,
        )


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("training.microbatch=auto", "training.microbatch: auto cannot be had with averaging.local_steps"),
        ("training.clip_norm=1.0", "training.clip_norm: 1 needs the norm of all stages at every inner step"),
    ],
)
def test_what_cannot_be_had_together_with_local_steps(job_path: Path, override: str, sentence: str) -> None:
    with pytest.raises(JobError) as caught:
        load_job(job_path, ["averaging.local_steps=2", override])
    assert str(caught.value).startswith(sentence)
