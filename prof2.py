import torch, time, gc, sys
torch.set_num_threads(1)
from tests.contract import ROWS as R
from decentfn.testing import algorithms as A
from decentfn.testing.subjects import ranks
ranks(R["all_reduce"], A._full(R["all_reduce"]))
mode=sys.argv[1]
if mode=="off": gc.disable()
if mode=="freeze": gc.collect(); gc.freeze(); gc.set_threshold(50_000, 20, 100)
for r in ("choco_sgd","d2","extra","diloco"):
    t=time.process_time()
    ranks(R[r], A._full(R[r]))
    ranks(R[r], A.Run("aot_eager", local=2))
    print(mode, r, "cpu", round(time.process_time()-t,2), flush=True)
