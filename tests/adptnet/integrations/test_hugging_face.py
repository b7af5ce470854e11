"""The Hugging Face classes compute what `SequenceModel` computes, and generate as transformers' own models do."""

import copy
import json

import pytest
import torch
from torch.testing import assert_close

import adptnet
from adptnet import nn, projections, spectra
from adptnet.errors import InputError, SpecError

transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("adptnet.integrations.hugging_face")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

VOCABULARY = 23
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SPECS = {
    "default": adptnet.ADPTNet(12, device="meta").spec,
    "orthogonal": adptnet.ADPTNet(12, projection=projections.Orthogonal(), beta=1.0).spec,
    "complex": adptnet.ADPTNet(12, spectrum=spectra.S4DInv(), beta=0.5).spec,
    "coupled": nn.CoupledADPTNet(12).spec,
}


@pytest.fixture(autouse=True)
def single_precision():
    """Use float32: transformers does not follow torch's default dtype everywhere."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


def make_model(name="default", depth=2, **options):
    """Return a causal language model in evaluation mode whose choices are not close to ties."""
    spec = nn.SequenceModel(SPECS[name], depth=depth, vocabulary=VOCABULARY, device="meta").spec
    model = hf.ADPTNetForCausalLM(hf.ADPTNetConfig(spec=spec, **TOKENS, **options)).eval()
    torch.nn.init.normal_(model.model.encoder.weight)
    torch.nn.init.normal_(model.lm_head.weight)
    return model


def make_tokens(batch=3, steps=9):
    return torch.randint(3, VOCABULARY, (batch, steps))


@pytest.mark.parametrize("name", SPECS)
def test_logits_and_loss_are_those_of_the_sequence_model(name):
    model, tokens = make_model(name), make_tokens()
    output = model(tokens, labels=tokens)
    logits, _ = model.to_sequence_model()(tokens)
    assert_close(output.logits, logits)
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert_close(output.loss, expected)


@pytest.mark.parametrize("name", SPECS)
def test_a_saved_model_is_loaded_by_the_auto_classes(name, tmp_path):
    model, tokens = make_model(name), make_tokens()
    model.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.to_spec() == model.config.to_spec()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    backbone = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert_close(backbone(tokens).last_hidden_state, model.model(tokens).last_hidden_state, rtol=0, atol=0)
    marked = [hasattr(p, "_no_weight_decay") for p in model.parameters()]
    assert any(marked)
    assert [hasattr(p, "_no_weight_decay") for p in loaded.parameters()] == marked


def test_weights_that_a_checkpoint_lacks_are_initialized_as_by_the_package(tmp_path):
    from safetensors.torch import load_file, save_file

    model = make_model()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    gone = [name for name in weights if "spectrum" in name]
    assert gone
    save_file({k: w for k, w in weights.items() if k not in gone}, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = hf.ADPTNetForCausalLM.from_pretrained(tmp_path).eval()
    fresh = hf.ADPTNetForCausalLM(model.config)
    for name in gone:  # the initialization of a spectrum is not random
        assert_close(loaded.get_parameter(name), fresh.get_parameter(name))
    assert_close(loaded.lm_head.weight, model.lm_head.weight, rtol=0, atol=0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["default", "complex"])
def test_padding_on_either_side_has_no_effect(name, side):
    model, lengths = make_model(name), [9, 4, 1]
    tokens, mask = make_tokens(), torch.zeros(3, 9, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, slice(9 - length, 9) if side == "left" else slice(length)] = 1
    padded = model(tokens, attention_mask=mask, use_cache=True)
    for row, length in enumerate(lengths):
        inside = mask[row].bool()
        alone = model(tokens[row : row + 1, inside], use_cache=True)
        assert_close(padded.logits[row, inside], alone.logits[0], rtol=1e-5, atol=1e-5)
        for state, expected in zip(padded.past_key_values.states, alone.past_key_values.states, strict=True):
            assert_close(state.state[row], expected.state[0], rtol=1e-5, atol=1e-5)
            assert state.position[row] == length


@pytest.mark.parametrize(
    "mode",
    [{}, {"num_beams": 3}, {"do_sample": True, "top_p": 0.9, "num_return_sequences": 2}],
    ids=["greedy", "beams", "sampling"],
)
@pytest.mark.parametrize("name", SPECS)
def test_generation_with_the_cache_is_that_without(name, mode):
    model, tokens = make_model(name), make_tokens()
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    results = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        results.append(
            model.generate(
                tokens, attention_mask=mask, max_new_tokens=12, min_new_tokens=12, use_cache=use_cache, **mode
            )
        )
    assert_close(*results)


def test_greedy_generation_is_that_of_the_sequence_model():
    model, tokens = make_model(), make_tokens()
    expected = model.to_sequence_model().generate(tokens, 15, temperature=0.0)
    assert_close(model.generate(tokens, max_new_tokens=15, min_new_tokens=15, eos_token_id=None), expected)


@pytest.mark.parametrize("name", SPECS)
def test_assisted_decoding_returns_the_greedy_tokens(name):
    """The assistant is a slightly different model, so that some of its candidates are accepted and some are not."""
    model, tokens = make_model(name), make_tokens(1)
    assistant = copy.deepcopy(model)
    with torch.no_grad():
        assistant.lm_head.weight.add_(0.5 * torch.randn_like(assistant.lm_head.weight))
    greedy = model.generate(tokens, max_new_tokens=40, do_sample=False)
    assert_close(model.generate(tokens, max_new_tokens=40, do_sample=False, assistant_model=assistant), greedy)
    assert_close(model.generate(tokens, max_new_tokens=40, do_sample=False, prompt_lookup_num_tokens=5), greedy)


@pytest.mark.parametrize("removed", [0, 1, 4, 5, 6, 9])
def test_a_cropped_cache_is_that_of_the_remaining_tokens(removed):
    model, tokens = make_model(), make_tokens(2, 9)
    cache = model(tokens[:, :3], use_cache=True).past_key_values
    for chunk in (tokens[:, 3:4], tokens[:, 4:]):
        model(chunk, past_key_values=cache, use_cache=True)
    cache.crop(-removed)
    assert cache.get_seq_length() == 9 - removed
    if removed == 9:
        assert cache.states is None
        return
    expected = model(tokens[:, : 9 - removed], use_cache=True).past_key_values
    for state, other in zip(cache.states, expected.states, strict=True):
        assert_close(state.state, other.state, rtol=1e-5, atol=1e-6)
        assert_close(state.position, other.position)


def test_the_cache_does_not_grow_and_says_how_far_it_goes_back():
    model = make_model(depth=1)
    cache = hf.RecurrentCache()
    for _ in range(300):
        model(make_tokens(1, 1), past_key_values=cache, use_cache=True)
    assert len(cache._calls) == 128
    assert cache.get_seq_length() == 300
    with pytest.raises(InputError, match="only the last 128 tokens can be removed"):
        cache.crop(-129)
    with pytest.raises(InputError, match="pass minus the number of tokens"):
        cache.crop(1)


@pytest.mark.parametrize("head", ["last", "mean"])
def test_a_classifier_is_the_sequence_model(head):
    spec = nn.SequenceModel(SPECS["default"], vocabulary=VOCABULARY, output_size=4, head=head).spec
    source, tokens = spec.build().eval(), make_tokens()
    model = hf.ADPTNetForSequenceClassification.from_sequence_model(source).eval()
    lengths = torch.tensor([9, 4, 2])
    mask = (torch.arange(9) < lengths.unsqueeze(1)).long()
    output = model(tokens, attention_mask=mask, labels=torch.tensor([0, 3, 1]))
    expected, _ = source(tokens, lengths=lengths)
    assert_close(output.logits, expected, rtol=1e-5, atol=1e-6)
    assert_close(output.loss, torch.nn.functional.cross_entropy(expected, torch.tensor([0, 3, 1])))
    assert model.to_sequence_model().spec == spec


def test_a_classifier_finds_padding_by_its_token():
    spec = nn.SequenceModel(SPECS["default"], vocabulary=VOCABULARY, device="meta").spec
    model = hf.ADPTNetForSequenceClassification(hf.ADPTNetConfig(spec=spec, num_labels=3, **TOKENS)).eval()
    tokens = make_tokens()
    tokens[1, 4:] = 0
    assert_close(model(tokens).logits[1:2], model(tokens[1:2, :4]).logits, rtol=1e-5, atol=1e-6)


def test_gradients_with_checkpointing_are_those_without():
    model, tokens = make_model().train(), make_tokens()
    model(tokens, labels=tokens).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(tokens, labels=tokens).loss.backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_tied_embeddings_stay_tied(tmp_path):
    model = make_model(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.encoder.weight
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.encoder.weight
    source = model.to_sequence_model()
    assert hf.ADPTNetForCausalLM.from_sequence_model(source).config.tie_word_embeddings


def test_resized_embeddings_are_saved_and_loaded(tmp_path):
    model, tokens = make_model(), make_tokens()
    model.resize_token_embeddings(VOCABULARY + 5)
    assert model(tokens).logits.shape[-1] == VOCABULARY + 5
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    assert loaded.to_sequence_model().spec.vocabulary == VOCABULARY + 5


def test_embeddings_in_place_of_tokens_and_hidden_states():
    model, tokens = make_model(), make_tokens()
    embedded = model.model.encoder(tokens)
    output = model(inputs_embeds=embedded, output_hidden_states=True)
    assert_close(output.logits, model(tokens).logits)
    assert len(output.hidden_states) == 3
    assert_close(output.hidden_states[0], embedded)
    assert_close(model(tokens, logits_to_keep=2).logits, output.logits[:, -2:])
    assert_close(model(tokens, return_dict=False)[0], output.logits)
    generated = model.generate(inputs_embeds=embedded, max_new_tokens=6, min_new_tokens=6)
    assert_close(generated, model.generate(tokens, max_new_tokens=6, min_new_tokens=6)[:, 9:])


def test_a_configuration_has_sizes_or_a_spec():
    config = hf.ADPTNetConfig(vocab_size=50, hidden_size=16, num_hidden_layers=3)
    spec = config.to_spec()
    assert (spec.vocabulary, spec.block.width, spec.depth) == (50, 16, 3)
    again = hf.ADPTNetConfig(**json.loads(config.to_json_string()))
    assert again.to_spec() == spec
    with pytest.raises(SpecError, match=r"hidden_size=8\): the spec has 16\. Drop hidden_size="):
        hf.ADPTNetConfig(spec=spec, hidden_size=8)
    with pytest.raises(SpecError, match="the model must take tokens"):
        hf.ADPTNetConfig(spec=nn.SequenceModel(SPECS["default"], input_size=3, output_size=2, device="meta").spec)
    with pytest.raises(SpecError, match="must be a ModelSpec"):
        hf.ADPTNetConfig(spec=json.loads(SPECS["default"].to_json()))


def test_wrong_arguments_are_answered():
    model, tokens = make_model(), make_tokens()
    with pytest.raises(InputError, match="exactly one of input_ids= and inputs_embeds="):
        model()
    with pytest.raises(InputError, match="a DynamicCache; this model takes a RecurrentCache"):
        model(tokens, past_key_values=transformers.DynamicCache())
    gap = torch.ones_like(tokens)
    gap[0, 3] = 0
    with pytest.raises(InputError, match="zeros between tokens"):
        model(tokens, attention_mask=gap)
    with pytest.raises(InputError, match="a row without tokens"):
        model(tokens, attention_mask=torch.zeros_like(tokens))
    with pytest.raises(InputError, match=r"attention_mask has shape \(3, 4\); it must be \(3, 9\)"):
        model(tokens, attention_mask=gap[:, :4])
    with pytest.raises(InputError, match="one output per sequence"):
        hf.ADPTNetForSequenceClassification.from_sequence_model(model.to_sequence_model())
    classifier = nn.SequenceModel(SPECS["default"], vocabulary=VOCABULARY, output_size=4, head="last")
    with pytest.raises(InputError, match="logits of every token at every step"):
        hf.ADPTNetForCausalLM.from_sequence_model(classifier)


def test_the_trainer_trains(tmp_path):
    """A model learns to repeat a short cycle of tokens."""
    pytest.importorskip("accelerate")
    model = make_model(depth=1).train()
    cycle = torch.arange(3, 8).repeat(6)
    rows = [{"input_ids": cycle[i : i + 20], "labels": cycle[i : i + 20]} for i in range(10)] * 8
    groups = adptnet.optim.param_groups(model, lr=1e-2, weight_decay=0.0)
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=8,
            num_train_epochs=3,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
        ),
        train_dataset=rows,
        optimizers=(torch.optim.AdamW(groups), None),
    )
    before = trainer.evaluate(rows)["eval_loss"]
    trainer.train()
    assert trainer.evaluate(rows)["eval_loss"] < 0.2 * before
