"""`df.state_dict` of networks of other packages: `load_state_dict` takes it strictly, and it comes back bit for bit."""

import pytest
import torch

import decentfn as df
from tests.models.cases import batch_of
from tests.models.test_models import made_by

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.thorough]  # what other packages warn of


@pytest.mark.parametrize("name", ["gpt-2", "llama-2-layers", "t5", "bert", "lora-on-gpt-2"])
def test_a_trained_state_goes_into_the_module_and_comes_back(name):
    made, other = made_by(name).make(), made_by(name).make().module
    module, before = made.module, {key: x.clone() for key, x in made.module.state_dict().items()}
    params, buffers, loss_fn = df.functional(module, **made.loss)
    init, step = df.all_reduce(df.autograd(loss_fn), df.sgd(0.05), df.topology("complete", 1))
    state, _ = step(init(params, buffers), batch_of(made, 0, 0), 0)
    given = df.state_dict(module, state)
    assert list(given) == list(before)
    assert any(not torch.equal(x, before[key]) for key, x in given.items())
    assert all(torch.equal(x, before[key]) for key, x in module.state_dict().items())

    with torch.no_grad():
        for x in other.parameters():
            x.fill_(7)
    other.load_state_dict(given, strict=True)
    trained = df.params(state) | df.buffers(state)
    named = dict((*other.named_parameters(), *other.named_buffers()))
    assert trained.keys() == named.keys() and all(torch.equal(x, trained[key]) for key, x in named.items())
    assert all(torch.equal(x, other.state_dict()[key]) for key, x in given.items())

    back = df.load_state_dict(module, init(params, buffers), other.state_dict())
    held = df.params(back) | df.buffers(back)
    assert held.keys() == trained.keys() and all(torch.equal(x, trained[key]) for key, x in held.items())
    first = module.state_dict()[next(iter(given))].data_ptr()  # one name of tied tensors suffices, so all are left out
    rest = {key: given[key] for key, x in module.state_dict().items() if x.data_ptr() != first}
    with pytest.raises(RuntimeError, match="Missing key"):
        df.load_state_dict(module, state, rest)
