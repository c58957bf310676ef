"""Classes of hostile input, one a file, which `python -m tests.fuzz.run` and pytest find by the folder.

How a class works, as `tests.fuzz.case.FuzzClass` declares it:

1. `make_sources` writes sound files, such as a small checkpoint, once for all cases.
2. `mutate` makes a case from them: a seed decides everything, so that each case can be run again.
3. `exercise` uses the case as a user would. It returns, or raises one of the class's `refusals`, whose
   message must be one clear line. Anything else is a fault: another exception, a crash, output that
   nobody asked for, files beside the case's folder, or too much time or memory.
4. `tests.fuzz.server` imports the library once, and runs cases in forked children, which have these
   limits. A child goes on with the next case until one fails; that one is then tried again alone.
5. `batch` is how many cases share a child, and with it what the class keeps, such as a server.

A new file with a `CLASS` is all that a new class needs.
"""
