def forward(
    variant: str,
    elements: tuple[int, int, int],
    activation: int,
    threads: int,
    addresses: tuple[int, ...],
    sizes: tuple[int, ...],
    /,
) -> None: ...
def variants() -> list[str]: ...
