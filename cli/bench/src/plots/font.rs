//! The font of plots: a free one that a crate carries.

use std::sync::OnceLock;

use plotters::style::{FontStyle, register_font};

/// The name under which plots ask for it; in SVG a browser's own font of that
/// kind is as good.
pub(super) const NAME: &str = "sans-serif";

/// Makes it known to plotters, once.
pub(super) fn register() -> Result<(), String> {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    let well = *REGISTERED.get_or_init(|| {
        register_font(NAME, FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT).is_ok()
    });
    well.then_some(())
        .ok_or_else(|| "the font cannot be read".into())
}
