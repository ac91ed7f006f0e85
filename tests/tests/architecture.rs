//! The shape of the project, held by tests: who may depend on whom, what the core must not touch, how large a file may
//! grow. `ARCHITECTURE.md` says why.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The project's root.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the package lies in the root").to_path_buf()
}

/// Every Rust file below `folder`, with its text.
fn sources(folder: &Path) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("the folder can be read") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).expect("a source file");
                found.push((path, text));
            }
        }
    }
    assert!(!found.is_empty(), "{} has sources", folder.display());
    found
}

/// The code of a file without comments and without its tests.
fn code(text: &str) -> String {
    let shipped = text.split("#[cfg(test)]").next().unwrap_or_default();
    shipped.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

#[test]
fn crates_depend_in_one_direction() {
    for (name, allowed) in [
        ("core", &[][..]),
        ("store", &["core"]),
        ("keeper", &["core"]),
        ("upstream", &["core", "keeper"]),
        ("mainstay", &["core", "keeper", "store", "upstream"]),
    ] {
        let manifest = fs::read_to_string(root().join("crates").join(name).join("Cargo.toml")).expect("a manifest");
        let shipped = manifest.split("[dev-dependencies]").next().unwrap_or_default();
        let ours: BTreeSet<_> =
            shipped.lines().filter_map(|line| line.strip_prefix("mainstay-")?.split(['.', ' ', '=']).next()).collect();
        let allowed: BTreeSet<_> = allowed.iter().copied().collect();
        assert!(ours.is_subset(&allowed), "{name} depends on {ours:?}, and may on {allowed:?} only");
    }
}

#[test]
fn the_core_is_pure() {
    let manifest = fs::read_to_string(root().join("crates/core/Cargo.toml")).expect("a manifest");
    let shipped = manifest.split("[dev-dependencies]").next().unwrap_or_default();
    let dependencies: BTreeSet<_> = shipped
        .lines()
        .filter_map(|line| line.strip_suffix(".workspace = true"))
        .filter(|name| !name.contains('-'))
        .collect();
    let pure = BTreeSet::from(["bytes", "memchr", "thiserror", "version", "edition", "license"]);
    assert!(dependencies.is_subset(&pure), "the core depends on {dependencies:?}");
    for (path, text) in sources(&root().join("crates/core/src")) {
        let code = code(&text);
        for banned in [
            "std::fs",
            "std::net",
            "std::process",
            "std::thread",
            "std::env",
            "std::io",
            "SystemTime",
            "Instant",
            "HashMap",
            "HashSet",
            "async fn",
            ".await",
            "rand::",
        ] {
            assert!(!code.contains(banned), "{} uses `{banned}`", path.display());
        }
    }
}

/// Which modules of the main crate a module may name.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("main", &["cli"]),
    ("cli", &["admin", "auth", "config", "demo", "engine", "runtime", "telemetry", "worker"]),
    ("worker", &["admin", "auth", "config", "engine", "reconcile", "runtime", "serve", "telemetry"]),
    ("demo", &["runtime"]),
    ("admin", &["engine", "runtime", "telemetry"]),
    ("serve", &["auth", "engine", "runtime"]),
    ("auth", &["config", "runtime"]),
    ("reconcile", &["engine", "runtime"]),
    ("engine", &["runtime", "telemetry"]),
    ("config", &[]),
    ("runtime", &[]),
    ("telemetry", &[]),
];

#[test]
fn modules_of_the_main_crate_import_in_one_direction() {
    let folder = root().join("crates/mainstay/src");
    let modules: Vec<_> = MAY_IMPORT.iter().map(|(module, _)| *module).collect();
    for (path, text) in sources(&folder) {
        let relative = path.strip_prefix(&folder).expect("below the folder");
        let first = relative.components().next().expect("a name").as_os_str().to_string_lossy().into_owned();
        let module = first.trim_end_matches(".rs");
        if module == "lib" {
            continue;
        }
        let (_, allowed) = MAY_IMPORT
            .iter()
            .find(|(name, _)| *name == module)
            .unwrap_or_else(|| panic!("`{module}` is not on the map; put it there and into ARCHITECTURE.md"));
        let code = code(&text);
        for other in modules.iter().filter(|other| **other != module && !allowed.contains(*other)) {
            let used = code.contains(&format!("crate::{other}::")) || code.contains(&format!("mainstay::{other}::"));
            assert!(!used, "{} imports `{other}`", relative.display());
        }
    }
}

#[test]
fn no_module_hides_in_mod_rs_and_no_name_is_empty_of_meaning() {
    for (path, _) in sources(&root().join("crates")) {
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        assert_ne!(name, "mod", "{}", path.display());
        for banned in ["manager", "helper", "util", "utils", "common", "misc"] {
            assert!(!name.split('_').any(|word| word == banned), "{}", path.display());
        }
    }
}

#[test]
fn files_stay_readable() {
    for (path, text) in sources(&root().join("crates")) {
        let lines = text.lines().count();
        assert!(
            lines <= 1000,
            "{} has {lines} lines; split it where a reader would look for the parts",
            path.display()
        );
    }
}

#[test]
fn the_lock_file_keeps_its_ceiling_and_its_bans() {
    let lock = fs::read_to_string(root().join("Cargo.lock")).expect("the lock file");
    let packages: Vec<_> = lock.lines().filter_map(|line| line.strip_prefix("name = ")).collect();
    assert!(packages.len() <= 350, "{} locked packages; the ceiling is 350", packages.len());
    for banned in ["\"openssl\"", "\"openssl-sys\"", "\"native-tls\"", "\"serde_yaml\""] {
        assert!(!packages.contains(&banned), "{banned} is banned");
    }
}

#[test]
fn every_code_has_its_page() {
    let text = fs::read_to_string(root().join("crates/core/src/code.rs")).expect("the codes");
    let names: BTreeSet<_> = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Self::")?.split_once("=> \"")?.1.strip_suffix("\","))
        .map(str::to_owned)
        .collect();
    assert!(names.len() > 20, "the names are found");
    let pages: BTreeSet<_> = fs::read_dir(root().join("docs/errors"))
        .expect("the pages")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.file_stem().is_some_and(|stem| stem != "README"))
        .map(|path| path.file_stem().expect("a name").to_string_lossy().into_owned())
        .collect();
    assert_eq!(names, pages, "docs/errors/ has one page for each code and no other");
}
