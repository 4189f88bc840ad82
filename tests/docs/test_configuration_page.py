"""docs/configuration.md says what core/config.py says."""

from pathlib import Path

from antiphon.core.config import RunConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_every_field_is_explained() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for section, info in RunConfig.model_fields.items():
        fields = info.annotation.model_fields  # type: ignore[union-attr]
        for field, detail in fields.items():
            assert detail.description, f"{section}.{field} has no doc string"
            inner = getattr(detail.annotation, "model_fields", None)
            names = [field] if inner is None else [f"{field}.{name}" for name in inner]
            assert all(f"`{section}.{name}`" in page for name in names)
