//! The JSON Schema of the configuration file, for editors.

/// The schema, as a JSON document.
pub fn document() -> serde_json::Value {
    schemars::schema_for!(super::file::File).to_value()
}
