def forward(
    variant: str,
    element: int,
    row_element: int,
    activation: int,
    threads: int,
    addresses: tuple[int, ...],
    sizes: tuple[int, ...],
    /,
) -> None: ...
def variants() -> list[str]: ...
