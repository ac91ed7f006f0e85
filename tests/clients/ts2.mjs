// The TypeScript client of the 2.x line, in its default mode (it initializes; no probe for the
// stateless revision), or with `auto` in that one which asks for the stateless revision first.
// Usage: ts2.mjs URL [auto] (see README.md).

import { drive } from './driver.mjs';
import { load } from './packages.mjs';

const { Client, StreamableHTTPClientTransport } = load('@modelcontextprotocol/client');

drive(({ url, fetch, elicit, sample }) => {
    const client = new Client(
        { name: 'ts2', version: '1.0.0' },
        {
            capabilities: { elicitation: {}, sampling: {} },
            versionNegotiation: { mode: process.argv[3] ?? 'legacy' }
        }
    );
    client.setRequestHandler('elicitation/create', elicit);
    client.setRequestHandler('sampling/createMessage', sample);
    const callTool = client.callTool.bind(client);
    // The 2.x line has dropped the result schema from between the parameters and the options.
    client.callTool = (params, _schema, options) => callTool(params, options);
    // A stateless client listens; one with a session subscribes, and hears of tools anyway.
    const listen = uri =>
        client.getProtocolEra() === 'modern'
            ? client.listen({ toolsListChanged: true, resourceSubscriptions: [uri] })
            : client.subscribeResource({ uri });
    return { client, transport: new StreamableHTTPClientTransport(url, { fetch }), listen };
});
