// The client that the official suite's client scenarios are run with: the TypeScript SDK of the 2.x
// line, which goes through a gateway. The suite starts a server for the scenario and appends its URL.
//
//   GATEWAY_URL=… FORWARD_PORT=… CLIENT_ERA=legacy|modern node conformance-client.mjs URL
//
// The gateway cannot know that URL when it is started; so it reaches the server through a forwarder
// on a port that it does know, which is here, too. What the client does is the same in each scenario:
// all that a server offers is listed and used.

import { createServer, request as forward } from 'node:http';

import { load } from './packages.mjs';

const { Client, StreamableHTTPClientTransport } = load('@modelcontextprotocol/client');

const { GATEWAY_URL, FORWARD_PORT, CLIENT_ERA } = process.env;
const { MCP_CONFORMANCE_CONTEXT, MCP_CONFORMANCE_PROTOCOL_VERSION } = process.env;
const target = new URL(process.argv[2]);
const HOST = '127.0.0.1';
const SAMPLES = { string: 'a', number: 2, integer: 2, boolean: true, array: [], object: {} };

/** Hands each request on to the scenario's server, whatever its path, and ends it with its client. */
function startForwarder() {
    const forwarder = createServer((incoming, response) => {
        const { method, headers } = incoming;
        const outgoing = forward(target, { method, headers: { ...headers, host: target.host } });
        outgoing.on('response', answer => {
            response.writeHead(answer.statusCode, answer.headers);
            answer.pipe(response);
        });
        outgoing.on('error', () => response.destroy());
        response.on('close', () => outgoing.destroy());
        incoming.pipe(outgoing);
    });
    return new Promise(resolve => {
        forwarder.listen(Number(FORWARD_PORT), HOST, () => resolve(forwarder));
    });
}

/** Arguments that fit a schema, for tools of which the scenario does not say what it wants. */
function argumentsFor(schema) {
    const required = schema.required ?? [];
    return Object.fromEntries(
        required.map(name => [name, SAMPLES[schema.properties?.[name]?.type] ?? 'a'])
    );
}

async function useTools(client) {
    const { tools } = await client.listTools();
    const wanted = JSON.parse(MCP_CONFORMANCE_CONTEXT ?? '{}').toolCalls;
    const calls =
        wanted ??
        tools.map(({ name, inputSchema }) => ({ name, arguments: argumentsFor(inputSchema) }));
    // Some servers answer calls that were not asked for with what is no result; the scenario judges.
    for (const call of calls) await client.callTool(call).catch(error => console.error(error.message));
}

async function useResources(client) {
    const { resources } = await client.listResources();
    for (const { uri } of resources) await client.readResource({ uri });
}

async function usePrompts(client) {
    const { prompts } = await client.listPrompts();
    for (const { name } of prompts) await client.getPrompt({ name });
}

function makeClient() {
    const mode = CLIENT_ERA === 'modern' ? { pin: MCP_CONFORMANCE_PROTOCOL_VERSION } : 'legacy';
    const client = new Client(
        { name: 'through-a-gateway', version: '1.0.0' },
        {
            capabilities: { elicitation: { form: { applyDefaults: true } }, sampling: {} },
            versionNegotiation: { mode }
        }
    );
    client.setRequestHandler('elicitation/create', () => ({ action: 'accept', content: {} }));
    return client;
}

const forwarder = await startForwarder();
const client = makeClient();
await client.connect(new StreamableHTTPClientTransport(new URL(GATEWAY_URL)));
const offered = client.getServerCapabilities() ?? {};
if (offered.tools) await useTools(client);
if (offered.resources) await useResources(client);
if (offered.prompts) await usePrompts(client);
await client.close();
forwarder.closeAllConnections();
forwarder.close();
