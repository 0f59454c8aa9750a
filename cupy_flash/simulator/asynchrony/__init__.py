"""Barriers and asynchronous instructions: mbarriers, clusters, cp.async, TMA, wgmma, setmaxnreg."""
