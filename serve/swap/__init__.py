"""Follows the store's serving pointer without failing a request.

Read ``swapper`` (the steps: prepare, commit, prove, go back), then ``compatibility`` (can this policy take the other's
place?) and ``verification`` (is it what its manifest says, without a NaN?). ``sleep`` (others have the devices for a
while) holds the swapper meanwhile. The exchange of weights itself is in ``serve.vllm.standby_weights``.
"""
