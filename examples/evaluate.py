"""Evaluate the policy of a run, and make a video of it.

    python examples/evaluate.py runs/... --episodes 10
    python examples/evaluate.py runs/... --checkpoint best --video policy.mp4

`python -m minerva_torchrl evaluate` does the same.
"""

from minerva_torchrl.runs import evaluate_main

if __name__ == "__main__":
    evaluate_main()
