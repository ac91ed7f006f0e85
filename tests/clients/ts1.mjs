// The TypeScript SDK of the 1.x line as a client. Usage: ts1.mjs URL (see README.md). A URL that ends in `/sse` is
// spoken to over HTTP+SSE (2024-11-05).

import { drive } from './driver.mjs';
import { load } from './packages.mjs';

const { Client } = load('@modelcontextprotocol/sdk/client/index.js');
const { StreamableHTTPClientTransport } = load(
    '@modelcontextprotocol/sdk/client/streamableHttp.js'
);
const { SSEClientTransport } = load('@modelcontextprotocol/sdk/client/sse.js');
const { CreateMessageRequestSchema, ElicitRequestSchema } = load(
    '@modelcontextprotocol/sdk/types.js'
);

drive(({ url, fetch, elicit, sample }) => {
    const client = new Client(
        { name: 'ts1', version: '1.0.0' },
        { capabilities: { elicitation: {}, sampling: {} } }
    );
    client.setRequestHandler(ElicitRequestSchema, elicit);
    client.setRequestHandler(CreateMessageRequestSchema, sample);
    const isSse = new URL(url).pathname.endsWith('/sse');
    const Transport = isSse ? SSEClientTransport : StreamableHTTPClientTransport;
    return { client, transport: new Transport(url, { fetch }) };
});
