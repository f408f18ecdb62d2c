"""What compute-sanitizer looks at: a small layer's forward and backward, on few multiprocessors.

python sanitizer_program.py CTAS_PER_RANK: every role has work, there are several macrobatches, and
a ring that is used again. The kernels' CTAs spin for each other, and the tools slow them down by
hundreds: few CTAs, long time-outs.
"""

import dataclasses
import sys

import kernel_library as kl
from kernel_cases import Problem, make_inputs


def main():
    kernels = kl.load()
    problem = Problem(70, 128, 128, 4, 2, ranks=2, biases=True, shared=64, shared_gate=True)
    inputs = make_inputs(kernels.torch, problem, unused=0.1)
    settings = kl.Settings(
        minibatch=128, macrobatch=256, ring=128, timeout=600.0, start_timeout=600.0
    )
    hooks = {"num_sms": int(sys.argv[1]) * problem.ranks}
    kl.Call(kernels, problem, inputs, settings).run(**hooks)
    kl.BackwardCall(kernels, problem, inputs, settings).run(**hooks)
    forward = kl.Call(kernels, problem, inputs, dataclasses.replace(settings, save=True))
    forward.run(**hooks)
    kl.BackwardCall(kernels, problem, inputs, settings, forward).run(**hooks)
    print("all calls without a fault")


if __name__ == "__main__":
    main()
