//! The OpenAPI 3.1 document of the admin API, made from the table of routes and the types that it serves.

use schemars::generate::{SchemaGenerator, SchemaSettings};
use serde_json::{Map, Value, json};

use super::problem;
use super::routes::{Answer, PROBLEM, ROUTES, Route};

/// The document; the same for every gateway of this version. `docs/openapi.json` is a copy.
pub fn document() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
    });
    // In what is answered every field is there, and null if it says nothing; what is asked may leave fields out.
    let mut answers = settings.clone().for_serialize().into_generator();
    let mut asked = settings.for_deserialize().into_generator();
    let problem = PROBLEM(&mut answers).to_value();
    let mut paths = Map::new();
    for route in ROUTES {
        let operation = operation(route, &mut answers, &mut asked);
        let path = paths.entry(route.path).or_insert_with(|| json!({}));
        path[route.method] = operation;
    }
    let mut schemas = answers.take_definitions(true);
    schemas.append(&mut asked.take_definitions(true));
    schemas.sort_keys();
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Mainstay admin API",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Sessions of a Mainstay gateway in the operator's hands. Every path here wants the admin \
                            token as a bearer; a scraper of /metrics too.",
        },
        "security": [{ "token": [] }],
        "paths": paths,
        "components": {
            "securitySchemes": { "token": { "type": "http", "scheme": "bearer" } },
            "responses": {
                "Problem": {
                    "description": "It was refused, or failed; `code` says why.",
                    "content": { problem::MEDIA_TYPE: { "schema": problem } },
                },
            },
            "schemas": schemas,
        },
    })
}

fn operation(route: &Route, answers: &mut SchemaGenerator, asked: &mut SchemaGenerator) -> Value {
    let mut parameters: Vec<Value> = path_parameters(route.path).map(path_parameter).collect();
    if let Some(query) = route.query {
        parameters.extend(query_parameters(&query(asked).to_value()));
    }
    let mut operation = json!({ "summary": route.summary, "operationId": operation_id(route) });
    if !parameters.is_empty() {
        operation["parameters"] = parameters.into();
    }
    if let Some(body) = route.body {
        let schema = body(asked).to_value();
        operation["requestBody"] =
            json!({ "required": route.body_needed, "content": { "application/json": { "schema": schema } } });
    }
    let (status, answer) = match route.answer {
        Answer::Json(status, schema) => {
            let schema = schema(answers).to_value();
            (status, json!({ "description": route.summary, "content": { "application/json": { "schema": schema } } }))
        }
        Answer::Nothing => (204, json!({ "description": "It is done." })),
        Answer::Text(media_type) => (
            200,
            json!({ "description": route.summary, "content": { media_type: { "schema": { "type": "string" } } } }),
        ),
    };
    let problem = json!({ "$ref": "#/components/responses/Problem" });
    operation["responses"] = json!({ status.to_string(): answer, "401": problem, "default": problem });
    operation
}

/// The method and the path's words, such as `postSessionsRefDrain`.
fn operation_id(route: &Route) -> String {
    let path = route.path.trim_start_matches("/api/v1");
    let words = path.split(|symbol: char| !symbol.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    let capitalised = words.map(|word| word[..1].to_ascii_uppercase() + &word[1..]);
    route.method.to_owned() + &capitalised.collect::<String>()
}

fn path_parameters(path: &'static str) -> impl Iterator<Item = &'static str> {
    path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
}

fn path_parameter(name: &str) -> Value {
    let schema = match name {
        "ref" => json!({ "type": "string", "pattern": "^s-[0-9a-f]{10}$" }),
        "name" => json!({ "type": "string" }),
        _ => json!({ "type": "integer", "minimum": 0 }),
    };
    json!({ "name": name, "in": "path", "required": true, "schema": schema })
}

/// The properties of a query's schema, each as a parameter.
fn query_parameters(schema: &Value) -> Vec<Value> {
    let properties = schema["properties"].as_object();
    let parameters = properties.into_iter().flatten().map(|(name, property)| {
        let mut schema = property.clone();
        let description = schema.as_object_mut().and_then(|schema| schema.remove("description"));
        json!({ "name": name, "in": "query", "required": false, "description": description, "schema": schema })
    });
    parameters.collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn o1_the_document_in_docs_is_this_one() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/openapi.json");
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let kept: Value = serde_json::from_str(&text).unwrap_or_default();
        assert!(kept == document(), "write it anew: `mainstay openapi > docs/openapi.json`");
    }

    #[test]
    fn o1_what_is_answered_has_every_field_and_says_of_which_that_they_can_be_null() {
        let document = document();
        let session = &document["components"]["schemas"]["SessionView"];
        let fields = session["properties"].as_object().unwrap();
        assert_eq!(session["required"].as_array().map(Vec::len), Some(fields.len()), "{session}");
        for field in ["client", "deadline", "ended_at", "continuity"] {
            assert_eq!(fields[field]["type"], json!(["string", "null"]), "{field}");
        }
        let order = &document["components"]["schemas"]["DrainOrder"];
        assert!(order.get("required").is_none(), "{order}");
    }

    #[test]
    fn o1_every_reference_leads_somewhere_and_every_operation_has_a_name_of_its_own() {
        let document = document();
        let text = document.to_string();
        for (at, _) in text.match_indices("\"$ref\":\"#") {
            let pointer = text[at + 9..].split('"').next().unwrap();
            assert!(document.pointer(pointer).is_some(), "`{pointer}` leads nowhere");
        }
        let mut names: Vec<_> = ROUTES.iter().map(operation_id).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), ROUTES.len());
        assert!(names.contains(&"postSessionsRefDrain".to_owned()), "{names:?}");
    }
}
