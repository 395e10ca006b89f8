"""Common parts of the pictures that are written as SVG."""

COLORS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd"),
    *("#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
)
TEXT, LINE = "#1f2933", "#cbd2d9"


def color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def text(x: int | float, y: int | float, words: str, **attributes: str) -> str:
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:g}" y="{y:g}"{more}>{words}</text>'


def document(width: int | float, height: int | float, title: str, body: list[str]) -> str:
    """Returns a complete SVG file with a white background."""
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    style = f'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="{TEXT}"'
    background = f'<rect width="{width:g}" height="{height:g}" fill="white"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>'
    return "\n".join([head, f"<title>{title}</title>", background, *body, "</svg>\n"])
