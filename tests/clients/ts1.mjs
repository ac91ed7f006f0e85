// The TypeScript SDK of the 1.x line as a client. Usage: ts1.mjs URL (see README.md).

import { drive } from './driver.mjs';
import { load } from './packages.mjs';

const { Client } = load('@modelcontextprotocol/sdk/client/index.js');
const { StreamableHTTPClientTransport } = load(
    '@modelcontextprotocol/sdk/client/streamableHttp.js'
);
const { ElicitRequestSchema } = load('@modelcontextprotocol/sdk/types.js');

drive(({ url, fetch, elicit }) => {
    const client = new Client(
        { name: 'ts1', version: '1.0.0' },
        { capabilities: { elicitation: {} } }
    );
    client.setRequestHandler(ElicitRequestSchema, elicit);
    return { client, transport: new StreamableHTTPClientTransport(url, { fetch }) };
});
