def forward(
    variant: str,
    elements: tuple[int, int, int],
    activation: int,
    threads: int,
    addresses: tuple[int, ...],
    sizes: tuple[int, ...],
    /,
) -> None: ...
def linear(
    variant: str,
    elements: tuple[int, int],
    threads: int,
    addresses: tuple[int, int, int, int],
    sizes: tuple[int, int, int],
    /,
) -> None: ...
def attention(
    variant: str, elements: int, threads: int, heads: tuple[int, int, int], numbers: list[int], /
) -> None: ...
def rows(
    variant: str,
    elements: int,
    threads: int,
    addresses: tuple[int, int, int],
    sizes: tuple[int, int],
    epsilon: float,
    /,
) -> None: ...
def variants() -> list[str]: ...
