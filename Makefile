# Two commands set everything up on a fresh machine: `make demo` and `make test`.
