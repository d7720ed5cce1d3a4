"""SGLang as engine: an unmodified server of its own process, with a plugin of ours inside of it.

| module | where it runs | what it does |
|---|---|---|
| `client` | in a job | asks the server, publishes what it has written |
| `lease` | in a job | finds, starts, changes, restarts and ends the one server |
| `keeper` | beside the server | starts it, ends it in order when nobody asks any more |
| `launch` | in a job | command, environment and plugin folder of a server |
| `plugin`, `collector` | in the server's scheduler (tensor-parallel rank 0) | takes the states out of each pass |
| `writer` | a process beside the scheduler | packs, writes, syncs and hashes samples |
"""
