"""The properties that transformers' generic model tests check, for the three classes.

Left out, since these models have none: attention weights, attention kernels and masks of four dimensions, head pruning,
position embeddings, encoder-decoder models, feed-forward chunking and key-value caches of other kinds.
"""

import copy
import inspect
import itertools

import pytest
import torch
from torch.testing import assert_close

import adptnet
from adptnet import nn

transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("adptnet.integrations.hugging_face")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

VOCABULARY = 19
CLASSES = ["ADPTNetModel", "ADPTNetForCausalLM", "ADPTNetForSequenceClassification"]


@pytest.fixture(autouse=True)
def single_precision():
    """Use float32: transformers does not follow torch's default dtype everywhere."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def make_config(**options):
    spec = nn.SequenceModel(adptnet.ADPTNet(8, device="meta").spec, depth=2, vocabulary=VOCABULARY, device="meta").spec
    return hf.ADPTNetConfig(spec=spec, pad_token_id=0, bos_token_id=1, eos_token_id=2, **options)


def make_inputs(batch=3, steps=7):
    return {
        "input_ids": torch.randint(3, VOCABULARY, (batch, steps)),
        "attention_mask": torch.ones(batch, steps, dtype=torch.int64),
    }


def first(outputs):
    return outputs[0]


@pytest.fixture(params=CLASSES)
def model(request):
    return getattr(hf, request.param)(make_config(num_labels=4)).eval()


def test_two_calls_are_identical(model):
    inputs = make_inputs()
    assert torch.equal(first(model(**inputs)), first(model(**inputs)))


def test_a_tuple_has_the_entries_of_the_named_outputs(model):
    inputs = make_inputs()
    named = model(**inputs, output_hidden_states=True, return_dict=True)
    plain = model(**inputs, output_hidden_states=True, return_dict=False)
    assert isinstance(plain, tuple)
    assert len(plain) == len(named.to_tuple())
    assert torch.equal(plain[0], named[0])
    assert len(named.hidden_states) == model.config.num_hidden_layers + 1
    assert all(h.shape == (3, 7, model.config.hidden_size) for h in named.hidden_states)


def test_a_saved_model_is_identical_and_keeps_its_configuration(model, tmp_path):
    model.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    kept, given = loaded.config.to_dict(), model.config.to_dict()
    assert {name for name in given if kept[name] != given[name]} <= {"_name_or_path", "dtype"}
    inputs = make_inputs()
    assert torch.equal(first(loaded.eval()(**inputs)), first(model(**inputs)))
    again = copy.deepcopy(model)
    assert torch.equal(first(again(**inputs)), first(model(**inputs)))


def test_weights_load_into_the_base_model_and_back(tmp_path):
    causal = hf.ADPTNetForCausalLM(make_config()).eval()
    causal.save_pretrained(tmp_path / "causal")
    base = hf.ADPTNetModel.from_pretrained(tmp_path / "causal").eval()
    inputs = make_inputs()
    assert torch.equal(base(**inputs)[0], causal.base_model(**inputs)[0])
    base.save_pretrained(tmp_path / "base")
    back, info = hf.ADPTNetForCausalLM.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert set(info["missing_keys"]) == {name for name, _ in back.named_parameters() if name.startswith("lm_head")}
    assert torch.equal(back.eval().base_model(**inputs)[0], base(**inputs)[0])


def test_a_sequence_does_not_depend_on_the_others_of_its_batch(model):
    inputs = make_inputs()
    together = first(model(**inputs))
    for row in range(3):
        alone = first(model(**{name: value[row : row + 1] for name, value in inputs.items()}))
        assert_close(together[row : row + 1], alone, rtol=1e-5, atol=1e-5)


def test_gradients_reach_every_parameter(model):
    model.train()
    first(model(**make_inputs())).square().sum().backward()
    assert not [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_embeddings_can_be_read_replaced_and_given(model):
    inputs = make_inputs()
    expected = first(model(**inputs))
    embedding = model.get_input_embeddings()
    given = {"inputs_embeds": embedding(inputs["input_ids"]), "attention_mask": inputs["attention_mask"]}
    assert_close(first(model(**given)), expected, rtol=1e-6, atol=1e-6)
    model.set_input_embeddings(torch.nn.Embedding(VOCABULARY, model.config.hidden_size))
    assert not torch.equal(first(model(**inputs)), expected)


def test_new_models_have_finite_weights_of_a_moderate_size(model):
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        assert parameter.abs().max() < 50, name
    torch.manual_seed(1)
    other = type(model)(model.config)
    torch.manual_seed(1)
    same = type(model)(model.config)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), same.parameters(), strict=True))


def test_the_first_argument_is_input_ids_and_a_half_precision_copy_runs(model):
    assert next(iter(inspect.signature(model.forward).parameters)) == "input_ids"
    outputs = first(model.to(torch.bfloat16)(**make_inputs()))
    assert outputs.isfinite().all()


@pytest.mark.parametrize(
    ("problem", "labels", "loss"),
    [
        ("single_label_classification", torch.tensor([0, 3, 1]), torch.nn.CrossEntropyLoss()),
        ("multi_label_classification", torch.tensor([[1.0, 0, 0, 1]] * 3), torch.nn.BCEWithLogitsLoss()),
        ("regression", torch.randn(3, 4), torch.nn.MSELoss()),
    ],
)
def test_a_classifier_has_the_loss_of_its_problem(problem, labels, loss):
    model = hf.ADPTNetForSequenceClassification(make_config(num_labels=4, problem_type=problem)).eval()
    outputs = model(**make_inputs(), labels=labels)
    assert_close(outputs.loss, loss(outputs.logits, labels))


def test_the_loss_of_the_language_model_is_of_the_next_token():
    model = hf.ADPTNetForCausalLM(make_config()).eval()
    inputs = make_inputs()
    labels = inputs["input_ids"].clone()
    labels[0, :3] = -100
    outputs = model(**inputs, labels=labels)
    expected = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert_close(outputs.loss, expected)


@pytest.mark.slow
def test_the_trainer_reaches_the_loss_of_our_training_loop(tmp_path):
    """Three seeds of each, on the same sequences: the mean losses differ by less than the spread of the seeds."""
    pytest.importorskip("accelerate")
    from adptnet_lab import tasks, training

    task = tasks.MadMemorisation(vocabulary=16, length=16, training_sequences=64, test_sequences=64)
    tokens = task.examples("train", torch.arange(64)).inputs  # keys and insert tokens: the next one is half predictable

    class Language(tasks.MadMemorisation):
        """The next token of the same sequences."""

        def examples(self, split, indices, *, length=None):
            rows = tokens[indices]
            return tasks.Batch(rows[:, :-1], rows[:, 1:])

    ours, theirs = [], []
    for seed in range(3):
        torch.manual_seed(seed)
        model = hf.ADPTNetForCausalLM(make_config())
        config = training.TrainConfig(
            steps=40, batch_size=16, learning_rate=1e-2, seed=seed, clip=1.0, schedule=training.Constant()
        )
        sequence_model = model.to_sequence_model()
        language = Language(vocabulary=VOCABULARY, length=16, training_sequences=64, test_sequences=64)
        training.train(sequence_model, language, config)
        scores = training.evaluate(sequence_model, language, [None], size=64)
        ours.append(next(iter(scores.values()))["loss"])
        torch.manual_seed(seed)
        model = hf.ADPTNetForCausalLM(make_config())
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=16,
            max_steps=40,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            weight_decay=0.0,
            adam_beta2=0.999,
            seed=seed,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
        )
        rows = [{"input_ids": row, "labels": row} for row in tokens]
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        theirs.append(trainer.evaluate(rows)["eval_loss"])
    spread = max(max(losses) - min(losses) for losses in (ours, theirs))
    mean = [sum(losses) / 3 for losses in (ours, theirs)]
    assert abs(mean[0] - mean[1]) <= max(spread, 0.02 * mean[0]), (ours, theirs)
    assert max(itertools.chain(ours, theirs)) < 0.75 * torch.tensor(float(VOCABULARY)).log().item()
