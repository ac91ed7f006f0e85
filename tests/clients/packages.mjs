// Loads npm packages from the test environment that `scripts/test-env` installs.
//
// The programs here live in the source tree and their packages do not, and ES modules are looked up
// from the importing file's own directory only. So they are loaded through a `require` that is
// anchored in the environment instead.

import { createRequire } from 'node:module';
import path from 'node:path';
import { fileURLToPath } from 'node:url';

const here = path.dirname(fileURLToPath(import.meta.url));
const environment = process.env.MAINSTAY_TEST_ENV ?? path.join(here, '../../target/test-env');

/** `require`, as seen from the environment's `package.json`. */
export const load = createRequire(path.resolve(environment, 'node/package.json'));
